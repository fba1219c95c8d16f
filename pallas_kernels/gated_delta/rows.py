"""The gated delta rule (`api.py`), row after row, for a tile of columns of a state in registers.

Each warp has 16 whole columns. A lane has four columns, and eight lanes share the keys of the same
columns, so a sum over keys stays within the warp:

    state [key_dim, 64]     columns   0 .. 15 | 16 .. 31 | 32 .. 47 | 48 .. 63
                            warp         0         1          2          3

All kernels that go row by row run the same `after_row`, so a state has the same bits whichever of
them computes it and however the rows were cut into blocks.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels import jax_internals as internals
from pallas_kernels.gated_delta.checks import DIM
from pallas_kernels.gated_delta.reference import EPS
from pallas_kernels.jax_internals import pl, plgpu
from pallas_kernels.tiles import load, rows_in_lanes

COLUMNS = 64
"""Columns of a tile."""
ROWS_AT_ONCE = 8
"""Rows that are normed at the same time."""

STATE_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((8, COLUMNS), (16,), (4,))), warp_dims=(-3,), lane_dims=(-4, -2), vector_dim=-1
)
ROW_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((1, DIM), (32,), (1,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
)
"""For copies of rows: each is one number per thread."""
KEY_LAYOUT, COLUMN_LAYOUT = STATE_LAYOUT.reduce(1), STATE_LAYOUT.reduce(0)


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a request's block, for one value head and a tile of its columns. Subclasses bring
    them to shared memory."""

    scratch: dict[str, Any]

    @property
    def width(self) -> int:
        raise NotImplementedError

    def decay_and_beta(self, row) -> tuple:
        """The decay and beta of a row, or of the last one if there is no such row."""
        raise NotImplementedError

    @property
    def request(self) -> Any:
        return lax.axis_index("request")

    @property
    def head(self) -> Any:
        return lax.axis_index("head")

    @property
    def columns(self) -> Any:
        return pl.ds(lax.axis_index("tile") * COLUMNS, COLUMNS)

    def run(self, state, first, start, end, out=None) -> Any:
        """The state after rows [start, end) of those that are in shared memory, which has rows of
        the block from `first` on. Writes each row's outputs to `out`, if it is given."""

        def one(row, carried):
            before, (decay, strength) = carried
            following = self.decay_and_beta(first + row + 1)
            after = self.after_row(before, row, decay, strength)
            if out is not None:
                asked = by_key(load(self.scratch["normed_queries"].at[row], KEY_LAYOUT))
                output = (after * asked).sum(axis=0).astype(out.dtype)
                internals.store(self.place_in(out, first + row), output)
            return after, following

        return lax.fori_loop(start, end, one, (state, self.decay_and_beta(first + start)))[0]

    def after_row(self, before, row, decay, strength) -> Any:
        """The state after one token."""
        key = by_key(load(self.scratch["normed_keys"].at[row], KEY_LAYOUT))
        kept = before * decay
        answer = (kept * key).sum(axis=0)
        value = load(self.scratch["values"].at[row, self.columns], COLUMN_LAYOUT)
        correction = (value - answer) * strength
        return kept + key * lax.broadcast_in_dim(correction, kept.shape, [1])

    def place_in(self, out, row) -> Any:
        return out.at[self.request, row, self.head, self.columns]

    def tile_of(self, states, slot) -> Any:
        return states.at[slot, self.head, :, self.columns]

    def state_before(self, states, slot, length) -> Any:
        """The tile of a state before the block: zeros at the start of a text."""
        return or_zeros(load(self.tile_of(states, slot), STATE_LAYOUT), length)


@dataclasses.dataclass(frozen=True)
class GivenRows(Rows):
    """Rows whose keys, values, decays and betas are in arrays of their own."""

    key: Any
    value: Any
    log_decay: Any
    beta: Any
    query: Any = None
    """None if no outputs are computed."""

    @property
    def width(self) -> int:
        return self.value.shape[1]

    @property
    def staged(self) -> int:
        """Rows that are in shared memory at the same time."""
        return min(self.width, self.scratch["values"].shape[0])

    def stage(self, first) -> None:
        """Copies rows from `first` on to shared memory, with keys and queries normed."""
        some = self.request, pl.ds(first, self.staged)
        key_head = lax.div(self.head, self.value.shape[2] // self.key.shape[2])
        self.stage_normed(self.key.at[(*some, key_head)], "normed_keys", 1.0)
        if self.query is not None:
            self.stage_normed(self.query.at[(*some, key_head)], "normed_queries", DIM**-0.5)
        copy(self.value.at[(*some, self.head)], self.scratch["values"].at[pl.ds(0, self.staged)])

    def stage_normed(self, source, name: str, length: float) -> None:
        target = self.scratch[name]
        copy(source, target.at[pl.ds(0, self.staged)])
        for first in range(0, target.shape[0], ROWS_AT_ONCE):
            some = target.at[pl.ds(first, ROWS_AT_ONCE)]
            internals.store(some, normed(load(some, rows_in_lanes(DIM)), length))

    def decay_and_beta(self, row) -> tuple:
        """As in `Rows`. `run` reads them a row early, to hide the wait."""
        place = self.request, jnp.minimum(row, self.width - 1), self.head
        return jnp.exp(self.log_decay[place]), self.beta[place]


def or_zeros(tile, length) -> Any:
    """The tile of a state, or zeros at the start of a text."""
    row = plgpu.broadcasted_iota(jnp.int32, tile.shape, 0, layout=STATE_LAYOUT)
    return jnp.where(row < length * DIM, tile, jnp.zeros_like(tile))


def copy(source, target) -> None:
    """Copies rows from global to shared memory, as float32."""
    internals.store(target, load(source, ROW_LAYOUT).astype(jnp.float32))


def normed(rows, length: float) -> Any:
    """Each row scaled to this length."""
    inverse = lax.rsqrt((rows * rows).sum(axis=1) + EPS) * length
    return rows * lax.broadcast_in_dim(inverse, rows.shape, [0])


def by_key(numbers) -> Any:
    return lax.broadcast_in_dim(numbers, (DIM, COLUMNS), [0])
