"""The kernel body of `block_read`: one thread block (one warpgroup) per request and value head.

It computes the formulas of `block_form.py` for all 128 columns of the head's state. With X the
block's keys and, below them, its queries, as the convolution leaves them:

    X [32, keys]   state [keys, columns]   ->  products [32, columns]      tensor core
    X              X^T                     ->  triangle [32, 32]           tensor core

Each number of the state is cut into three bfloat16 numbers whose sum it is, so that nothing is
rounded before products are added up (`thirds.py`). Then each thread takes one column, and solves
the triangle for corrections and outputs, row after row.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels import jax_internals as internals
from pallas_kernels.gated_delta.checks import BLOCK_ROWS, DIM
from pallas_kernels.gated_delta.projected_rows import (
    ONE_PER_THREAD,
    ProjectedRows,
    sigmoid,
    silu,
    softplus,
)
from pallas_kernels.gated_delta.reference import EPS
from pallas_kernels.gated_delta.rows import (
    ROW_LAYOUT,
)
from pallas_kernels.gated_delta.thirds import (
    LEFT,
    PIECE,
    RIGHT,
    SINGLE,
    SUMS,
    add_product,
    thirds_of,
)
from pallas_kernels.jax_internals import pl, plgpu
from pallas_kernels.tiles import (
    THREADS,
    each,
    instruction,
    load,
    rows_in_lanes,
    swizzled,
    unswizzled,
)

SILU = """{
.reg .f32 t;
mul.f32 t, $1, 0fBFB8AA3B;
ex2.approx.ftz.f32 t, t;
add.f32 t, t, 0f3F800000;
rcp.approx.ftz.f32 t, t;
mul.f32 $0, $1, t;
}"""
"""x / (1 + 2 ** (x * -log2(e)))."""
ARRIVING = 32
"""Rows of the state that are copied at once, so that products can begin before all have arrived."""
STACKED = 2 * BLOCK_ROWS
"""Rows of keys and, below them, queries."""
HALVES = (0, BLOCK_ROWS)
"""Where keys and queries begin. They are multiplied separately: jax would share out the rows of
both over the warps, and each warp would then have to cut half of the state into thirds."""


def scratch_of_products() -> Any:
    """Memory for rows that are loaded one by one, and so must not be swizzled. jax 0.12 would
    swizzle it if no tiling were given. jax 0.11 does not, and cannot store to tiles."""
    shape = STACKED, DIM
    if internals.STORES_ANY_LAYOUT:
        return unswizzled(shape, jnp.float32, (1, DIM))
    return plgpu.SMEM(shape, jnp.float32)


def scratch_of_reading(dtype: Any) -> dict[str, Any]:
    numbers = plgpu.SMEM((THREADS,), jnp.float32)
    factors = plgpu.SMEM((STACKED,), jnp.float32)
    return {
        "staged_state": swizzled((DIM, DIM), jnp.float32),
        "arrived": plgpu.Barrier(num_barriers=DIM // ARRIVING),
        "stacked": swizzled((STACKED, DIM), dtype, bytes_per_row=2 * PIECE),
        "values": unswizzled((BLOCK_ROWS, DIM), jnp.float32, (1, DIM)),
        "products": scratch_of_products(),
        "triangle": plgpu.SMEM((STACKED, STACKED), jnp.float32),
        "betas": numbers,
        "log_decays": numbers,
        "sums_of_decays": numbers,
        "squares": factors,
        "of_products": factors,
        "of_values": plgpu.SMEM((BLOCK_ROWS,), jnp.float32),
    }


class Loaded(NamedTuple):
    """What a thread block reads of memory besides the state and the block's rows, in registers."""

    taps: list
    """Those of the heads of keys, queries and values."""
    tails: list
    """The inputs before the block, likewise."""
    projected: tuple
    """Outputs of the projection for the betas and the decays of all rows."""
    of_head: tuple
    """What is added to the decays, and their log rate."""


@dataclasses.dataclass(frozen=True)
class BlockOfRows:
    """The rows of a request's block, for one value head."""

    made: ProjectedRows
    slot: Any
    length: Any
    """Positions before the block."""
    interpreted: bool

    @property
    def scratch(self) -> dict[str, Any]:
        return self.made.scratch

    @property
    def width(self) -> int:
        return self.made.width

    @property
    def place(self) -> tuple:
        """Where this head's rows are in an array of all."""
        return self.made.request, slice(None), columns_of(self.made.head)

    def fetch(self, states) -> None:
        """Starts the copy of the state, or writes zeros if this is the start of a text."""
        target = self.scratch["staged_state"]

        @pl.when(self.length > 0)
        def _():
            source = states.at[self.slot, self.made.head]
            for i in range(DIM // ARRIVING):
                some, arrived = pl.ds(i * ARRIVING, ARRIVING), self.scratch["arrived"].at[i]
                plgpu.copy_gmem_to_smem(source.at[some], target.at[some], arrived)

        @pl.when(self.length <= 0)
        def _():
            for first in range(0, DIM, PIECE):
                nothing = plgpu.layout_cast(jnp.zeros((PIECE, DIM), jnp.float32), ROW_LAYOUT)
                internals.store(target.at[pl.ds(first, PIECE)], nothing)

    @property
    def of_gates(self) -> tuple:
        """Where this head's gates are in the projection."""
        first = self.made.taps.shape[1] // DIM
        return self.made.request, slice(None), columns_of(first + self.made.head)

    @property
    def heads(self) -> tuple:
        """The heads of the projection that this value head reads: of keys, queries and values."""
        key_head = lax.div(self.made.head, self.shared)
        key_heads = self.made.key_heads
        return key_heads + key_head, key_head, 2 * key_heads + self.made.head

    @property
    def shared(self) -> int:
        """Value heads that have the same keys."""
        return self.made.value_heads // self.made.key_heads

    def load_rows(self) -> list:
        """The inputs of the convolution for each of the heads, from the block itself."""
        inputs, request = self.made.inputs, self.made.request
        block = lambda head: load(inputs.at[request, :, columns_of(head)], ROW_LAYOUT)
        return [block(head) for head in self.heads]

    def load_rest(self) -> Loaded:
        """Asks for everything at once, so that it is waited for only once."""
        made, heads, of_tap = self.made, self.heads, ROW_LAYOUT.reduce(0)
        tap = lambda i, head: load(made.taps.at[i, columns_of(head)], of_tap)
        tail = lambda head: load(made.tails.at[self.slot, :, columns_of(head)], ROW_LAYOUT)
        return Loaded(
            [[tap(i, head) for i in range(made.taps.shape[0])] for head in heads],
            [tail(head) for head in heads],
            (self.of_rows(0), self.of_rows(made.value_heads)),
            (made.decay_bias[made.head], made.log_rate[made.head]),
        )

    def stage(self, rows: list, loaded: Loaded, keys) -> None:
        """Computes the rows into shared memory, keys and queries stacked, and writes the keys to
        memory once for all value heads that share them."""
        made, stacked = self.made, self.scratch["stacked"]
        key, query, value = map(self.convolved, rows, loaded.taps, loaded.tails)
        for first, rows in zip(HALVES, (key, query)):
            internals.store(stacked.at[pl.ds(first, BLOCK_ROWS)], self.filled(rows))
        internals.store(self.scratch["values"], self.filled(value).astype(jnp.float32))
        self.store_scalars(*loaded.projected, *loaded.of_head)

        @pl.when(lax.rem(made.head, self.shared) == 0)
        def _():
            key_head = lax.div(made.head, self.shared)
            internals.store(keys.at[made.request, :, columns_of(key_head)], key)

    def filled(self, rows) -> Any:
        """The rows, followed by rows of zeros up to `BLOCK_ROWS`."""
        if self.width == BLOCK_ROWS:
            return rows
        nothing = jnp.zeros((BLOCK_ROWS - self.width, DIM), rows.dtype)
        return jnp.concatenate([rows, plgpu.layout_cast(nothing, ROW_LAYOUT)], axis=0)

    def convolved(self, rows, taps: list, tail) -> Any:
        """One head's rows, in the dtype of the projection. At the start of a text there are zeros
        before the block."""
        shape, wide = (self.width, DIM), tail.astype(jnp.float32)
        begun = plgpu.broadcasted_iota(jnp.int32, tail.shape, 0, layout=ROW_LAYOUT)
        begun = begun < self.length * tail.shape[0]
        before = jnp.where(begun, wide, jnp.zeros_like(wide))
        seen = jnp.concatenate([before, rows.astype(jnp.float32)], axis=0)
        total = None
        for i, tap in enumerate(taps):
            tap = lax.broadcast_in_dim(tap.astype(jnp.float32), shape, [1])
            term = seen[i : i + self.width] * tap
            total = term if total is None else total + term
        return rounded_silu(total, self.interpreted).astype(self.made.inputs.dtype)

    def of_rows(self, section: int) -> Any:
        """An output of the projection for every row: thread t has that of row t modulo 16."""
        inputs, thread = self.made.inputs, row_of_thread()
        place = inputs.shape[2] - 2 * self.made.value_heads + section + self.made.head
        numbers = jnp.zeros_like(thread, jnp.float32)
        for row in range(self.width):
            number = inputs[self.made.request, row, place].astype(jnp.float32)
            numbers = jnp.where(thread == row, number, numbers)
        return numbers

    def store_scalars(self, of_beta, of_decay, bias, log_rate) -> None:
        log_decays = softplus(of_decay + bias) * -jnp.exp(log_rate)
        internals.store(self.scratch["log_decays"], log_decays)
        internals.store(self.scratch["betas"], sigmoid(of_beta))

    def sum_decays(self, decayed) -> None:
        """The log decays up to and including each row, in the order of the rows."""
        log_decays, thread = self.scratch["log_decays"], row_of_thread()
        total = jnp.zeros_like(thread, jnp.float32)
        for row in range(self.width):
            total = total + jnp.where(thread >= row, log_decays[row], 0.0)
        internals.store(self.scratch["sums_of_decays"], total)
        internals.store(decayed.at[self.made.request, 0, columns_of(self.made.head)], total)

    def make_triangle(self) -> None:
        """Writes the factors of earlier corrections in each correction (A in `block_form.py`) and,
        below, of corrections in each output (B); and the factors of products and values."""
        self.store_squares()
        for half, products in zip(HALVES, self.products_of_rows()):
            shape = products.shape
            factor, decayed = self.store_factors(half)
            row, column = (
                plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=SUMS) for axis in (0, 1)
            )
            taken = column < row + (half > 0)
            sooner = load(self.scratch["sums_of_decays"].at[pl.ds(0, STACKED)], SUMS.reduce(0))
            between = by_row(decayed, shape) - lax.broadcast_in_dim(sooner, shape, [1])
            factors = by_row(factor, shape) * jnp.exp(jnp.where(taken, between, 0.0))
            rows = self.scratch["triangle"].at[pl.ds(half, BLOCK_ROWS)]
            internals.store(rows, jnp.where(taken, products * factors, 0.0))

    def store_squares(self) -> None:
        """The squared lengths of keys and queries."""
        numbers = load(self.scratch["stacked"], rows_in_lanes(DIM)).astype(jnp.float32)
        internals.store(self.scratch["squares"], (numbers * numbers).sum(axis=1))

    def products_of_rows(self) -> list:
        """The products of keys, and of queries, with all keys and queries."""
        sums = [zeros_of(STACKED) for _ in HALVES]
        for first in range(0, DIM, PIECE):
            some = pl.ds(first, PIECE)
            right = load(self.scratch["stacked"].at[:, some].T, RIGHT)
            sums = self.with_products(sums, some, [right])
        return sums

    def with_products(self, sums: list, some, rights: Iterable) -> list:
        """Adds the products over some dimensions to the sums for keys and for queries."""
        for i, half in enumerate(HALVES):
            left = load(self.scratch["stacked"].at[pl.ds(half, BLOCK_ROWS), some], LEFT)
            for right in rights:
                sums[i] = add_product(sums[i], left, right, self.interpreted)
        return sums

    def store_factors(self, half: int) -> tuple:
        """Stores the factors of one half. They divide keys by their lengths twice, because
        corrections are divided by them as well."""
        some, rows = pl.ds(half, BLOCK_ROWS), SUMS.reduce(1)
        inverse = lax.rsqrt(load(self.scratch["squares"].at[some], rows) + EPS)
        decayed = load(self.scratch["sums_of_decays"].at[some], rows)
        if half:
            factor = inverse * DIM**-0.5
        else:
            of_values = inverse * load(self.scratch["betas"].at[some], rows)
            internals.store(self.scratch["of_values"], of_values)
            factor = of_values * inverse
        internals.store(self.scratch["of_products"].at[some], factor * jnp.exp(decayed))
        return factor, decayed

    def multiply_state(self) -> None:
        sums = [zeros_of(DIM) for _ in HALVES]
        for first in range(0, DIM, PIECE):
            if first % ARRIVING == 0:
                arrived = self.scratch["arrived"].at[first // ARRIVING]
                pl.when(self.length > 0)(functools.partial(plgpu.barrier_wait, arrived))
            some = pl.ds(first, PIECE)
            thirds = thirds_of(
                load(self.scratch["staged_state"].at[some], SINGLE), self.interpreted
            )
            sums = self.with_products(sums, some, thirds)
        for half, products in zip(HALVES, sums):
            internals.store(self.scratch["products"].at[pl.ds(half, BLOCK_ROWS)], products)

    def solve(self) -> tuple:
        """Corrections and outputs, row after row. Each thread has one column."""
        triangle, of_products = self.scratch["triangle"], self.scratch["of_products"]
        one = lambda name, row: load(self.scratch[name].at[pl.ds(row, 1)], ROW_LAYOUT)
        products = lambda row: one("products", row) * of_products[row]
        corrected, outputs = [], []
        for row in range(self.width):
            rest = one("values", row) * self.scratch["of_values"][row] - products(row)
            for sooner in range(row):
                rest = rest - corrected[sooner] * triangle[row, sooner]
            corrected.append(rest)
            below = row + BLOCK_ROWS
            output = products(below)
            for sooner in range(row + 1):
                output = output + corrected[sooner] * triangle[below, sooner]
            outputs.append(output)
        return jnp.concatenate(corrected, axis=0), jnp.concatenate(outputs, axis=0)


def rounded_silu(x, interpreted: bool) -> Any:
    """SiLU with a fifth of the instructions. Its error is in the last bits of float32 and vanishes
    when the result is rounded to 16 bits."""
    return silu(x) if interpreted else each(instruction(SILU), ROW_LAYOUT, x)


def columns_of(head) -> Any:
    return pl.ds(head * DIM, DIM)


def row_of_thread() -> Any:
    thread = plgpu.broadcasted_iota(jnp.int32, (THREADS,), 0, layout=ONE_PER_THREAD)
    return lax.rem(thread, BLOCK_ROWS)


def by_row(numbers, shape: tuple[int, int]) -> Any:
    return lax.broadcast_in_dim(numbers, shape, [0])


def zeros_of(columns: int) -> Any:
    return plgpu.layout_cast(jnp.zeros((BLOCK_ROWS, columns), jnp.float32), SUMS)
