"""The kernel body of `block_folds`: folds the first n rows of a block into the states, in float32.

    S <- exp(G[n]) S + sum over j <= n of exp(G[n] - G[j]) k[j] u[j]^T            (`block_form.py`)

One thread block per layer, request, value head and tile of columns, which stays in registers
(`rows.py`). The corrections u are known, so no row needs sums from the row before it, and the
kernel takes as long as reading and writing the states. It also moves the tails on, which saves a
kernel per layer. One kernel folds all layers, because with one for each the memory would be idle at
both ends of every kernel.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels import jax_internals as internals
from pallas_kernels.gated_delta.block_form import OF_HEAD
from pallas_kernels.gated_delta.checks import BLOCK_ROWS, DIM
from pallas_kernels.gated_delta.of_layers import OfLayers, Place
from pallas_kernels.gated_delta.projected_rows import ONE_PER_THREAD
from pallas_kernels.gated_delta.rows import (
    COLUMN_LAYOUT,
    COLUMNS,
    KEY_LAYOUT,
    ROW_LAYOUT,
    ROWS_AT_ONCE,
    STATE_LAYOUT,
    Rows,
    by_key,
    or_zeros,
)
from pallas_kernels.jax_internals import pl, plgpu
from pallas_kernels.tiles import load


def scratch_of_folding() -> dict[str, Any]:
    return {
        "staged_keys": plgpu.SMEM((BLOCK_ROWS, DIM), jnp.float32),
        "staged_corrections": plgpu.SMEM((BLOCK_ROWS, DIM), jnp.float32),
        "sums_of_decays": plgpu.SMEM((OF_HEAD,), jnp.float32),
        "left": plgpu.SMEM((OF_HEAD,), jnp.float32),
    }


@dataclasses.dataclass(frozen=True)
class FoldedBlocks:
    """The blocks of all layers."""

    inputs: OfLayers
    keys: OfLayers
    corrections: OfLayers
    decayed: OfLayers
    tails: OfLayers
    state: OfLayers
    slots: Any
    lengths: Any
    counts: Any

    @property
    def key_heads(self) -> int:
        return self.keys.shape[2] // DIM

    @property
    def shared(self) -> int:
        """Value heads that have the same keys."""
        return self.corrections.shape[2] // self.keys.shape[2]


def fold_blocks(blocks: FoldedBlocks, scratch: dict[str, Any]) -> None:
    rows = Rows(scratch)
    count, slot = blocks.counts[rows.request], blocks.slots[rows.request]
    tile = Place((slot, rows.head), 0, DIM, lax.axis_index("tile") * COLUMNS, COLUMNS)

    @pl.when(count > 0)
    def _():
        # Nothing waits for the state before all other loads have begun.
        before, length = blocks.state.load(tile, STATE_LAYOUT), blocks.lengths[rows.request]
        last = stage_kept(rows, blocks, count)
        move_tails(rows, blocks, slot, length, count)
        before = or_zeros(before, length) * last
        after = lax.fori_loop(0, count, lambda row, state: added(rows, state, row), before)
        blocks.state.store(tile, after, STATE_LAYOUT)


def move_tails(rows: Rows, blocks: FoldedBlocks, slot, length, count) -> None:
    """Shares out the tail's channels over the thread blocks. The first tile of each value head
    moves the values. The second moves the queries and keys of a key head, if this is the first
    value head that the key head serves."""
    tile, key_heads = lax.axis_index("tile"), blocks.key_heads
    move = lambda head: move_tail(rows, blocks, slot, length, count, head)

    @pl.when(tile == 0)
    def _():
        move(2 * key_heads + rows.head)

    @pl.when((tile == 1) & (lax.rem(rows.head, blocks.shared) == 0))
    def _():
        key_head = lax.div(rows.head, blocks.shared)
        move(key_head)
        move(key_heads + key_head)


def move_tail(rows: Rows, blocks: FoldedBlocks, slot, length, count, head) -> None:
    """Moves the tail of one head on: to the last rows of the old tail and the first `count` inputs.
    All is read before any is written, and no other thread block has these channels."""
    tails, inputs, recent = blocks.tails, blocks.inputs, blocks.tails.shape[1]
    one = lambda array, matrix, row: array.load(of_head((matrix,), row, 1, head), ROW_LAYOUT)
    # A condition must have the shape of what it chooses, so each is made from a row of zeros.
    zero = plgpu.broadcasted_iota(jnp.int32, (1, DIM), 0, layout=ROW_LAYOUT)
    last = []
    for row in range(recent):
        place = count + row
        sooner, later = jnp.minimum(place, recent - 1), jnp.maximum(place - recent, 0)
        old, new = one(tails, slot, sooner), one(inputs, rows.request, later)
        old = jnp.where(zero < length, old, jnp.zeros_like(old))
        last.append(jnp.where(zero + place < recent, old, new))
    whole = of_head((slot,), 0, recent, head)
    tails.store(whole, jnp.concatenate(last, axis=0), ROW_LAYOUT)


def stage_kept(rows: Rows, blocks: FoldedBlocks, count) -> Any:
    """Copies the kept rows' keys, corrections and factors, exp(G[n] - G[j]), to shared memory.
    Returns the factor of the state, exp(G[n])."""
    sources = {
        "staged_keys": (blocks.keys, lax.div(rows.head, blocks.shared)),
        "staged_corrections": (blocks.corrections, rows.head),
    }
    sums = blocks.decayed.load(of_head((rows.request,), 0, None, rows.head), ONE_PER_THREAD)
    width = blocks.keys.shape[1]
    for first in range(0, width, ROWS_AT_ONCE):
        number = min(ROWS_AT_ONCE, width - first)

        @pl.when(count > first)
        def _(first=first, number=number):
            for name, (array, head) in sources.items():
                place = of_head((rows.request,), first, number, head)
                some = array.load(place, ROW_LAYOUT).astype(jnp.float32)
                internals.store(rows.scratch[name].at[pl.ds(first, number)], some)

    internals.store(rows.scratch["sums_of_decays"], sums)
    of_last = rows.scratch["sums_of_decays"][count - 1]
    internals.store(rows.scratch["left"], jnp.exp(of_last - sums))
    return jnp.exp(of_last)


def of_head(matrix: tuple, first_row, rows: int | None, head) -> Place:
    return Place(matrix, first_row, rows, head * DIM, DIM)


def added(rows: Rows, state, row) -> Any:
    """The state with one row folded in."""
    key = by_key(load(rows.scratch["staged_keys"].at[row], KEY_LAYOUT))
    correction = load(rows.scratch["staged_corrections"].at[row, rows.columns], COLUMN_LAYOUT)
    correction = correction * rows.scratch["left"][row]
    return state + key * lax.broadcast_in_dim(correction, state.shape, [1])
