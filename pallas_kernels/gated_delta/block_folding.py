"""The kernel body of `block_fold`: folds the first n rows of a block into the states, in float32.

    S <- exp(G[n]) S + sum over j <= n of exp(G[n] - G[j]) k[j] u[j]^T            (`block_form.py`)

One thread block per request, value head and tile of columns, which stays in registers (`rows.py`).
The corrections u are known, so no row needs sums from the row before it, and the kernel takes as
long as reading and writing the states. It also moves the tails on, which saves a kernel per layer.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels import jax_internals as internals
from pallas_kernels.gated_delta.block_reading import columns_of
from pallas_kernels.gated_delta.checks import BLOCK_ROWS, DIM
from pallas_kernels.gated_delta.projected_rows import ONE_PER_THREAD
from pallas_kernels.gated_delta.rows import (
    COLUMN_LAYOUT,
    KEY_LAYOUT,
    ROW_LAYOUT,
    ROWS_AT_ONCE,
    Rows,
    by_key,
    copy,
)
from pallas_kernels.jax_internals import pl, plgpu
from pallas_kernels.tiles import THREADS, load


def scratch_of_folding() -> dict[str, Any]:
    return {
        "staged_keys": plgpu.SMEM((BLOCK_ROWS, DIM), jnp.float32),
        "staged_corrections": plgpu.SMEM((BLOCK_ROWS, DIM), jnp.float32),
        "left": plgpu.SMEM((THREADS,), jnp.float32),
    }


def fold_block(
    inputs,
    keys,
    corrections,
    decayed,
    slots,
    lengths,
    counts,
    states,
    tails,
    **scratch: Any,
) -> None:
    rows = Rows(scratch)
    count, slot = counts[rows.request], slots[rows.request]

    @pl.when(count > 0)
    def _():
        before = rows.state_before(states, slot, lengths[rows.request])
        block = inputs.at[rows.request]
        move_tails(rows, block, tails.at[slot], lengths[rows.request], count, keys.shape[2] // DIM)
        last = stage_kept(rows, keys, corrections, decayed, count)
        after = lax.fori_loop(0, count, lambda row, state: added(rows, state, row), before * last)
        internals.store(rows.tile_of(states, slot), after)


def move_tails(rows: Rows, inputs, tails, length, count, key_heads: int) -> None:
    """Shares out the tail's channels over the thread blocks. The first tile of each value head
    moves the values. The second moves the queries and keys of a key head, if this is the first
    value head that the key head serves."""
    shared = (tails.shape[1] // DIM - 2 * key_heads) // key_heads
    tile, key_head = lax.axis_index("tile"), lax.div(rows.head, shared)

    @pl.when(tile == 0)
    def _():
        move_tail(inputs, tails, length, count, 2 * key_heads + rows.head)

    @pl.when((tile == 1) & (lax.rem(rows.head, shared) == 0))
    def _():
        move_tail(inputs, tails, length, count, key_head)
        move_tail(inputs, tails, length, count, key_heads + key_head)


def move_tail(inputs, tails, length, count, head) -> None:
    """Moves the tail of one head on: to the last rows of the old tail and the first `count` inputs.
    All is read before any is written, and no other thread block has these channels."""
    columns, recent = columns_of(head), tails.shape[0]
    one = lambda ref, row: load(ref.at[pl.ds(row, 1), columns], ROW_LAYOUT)
    # A condition must have the shape of what it chooses, so each is made from a row of zeros.
    zero = plgpu.broadcasted_iota(jnp.int32, (1, DIM), 0, layout=ROW_LAYOUT)
    last = []
    for row in range(recent):
        place = count + row
        sooner, later = jnp.minimum(place, recent - 1), jnp.maximum(place - recent, 0)
        old, new = one(tails, sooner), one(inputs, later)
        old = jnp.where(zero < length, old, jnp.zeros_like(old))
        last.append(jnp.where(zero + place < recent, old, new))
    internals.store(tails.at[:, columns], jnp.concatenate(last, axis=0))


def stage_kept(rows: Rows, keys, corrections, decayed, count) -> Any:
    """Copies the kept rows' keys, corrections and factors, exp(G[n] - G[j]), to shared memory.
    Returns the factor of the state, exp(G[n])."""
    shared = corrections.shape[2] // keys.shape[2]
    sources = {
        "staged_keys": (keys, lax.div(rows.head, shared)),
        "staged_corrections": (corrections, rows.head),
    }
    width, columns = keys.shape[1], columns_of(rows.head)
    for first in range(0, width, ROWS_AT_ONCE):
        some = pl.ds(first, min(ROWS_AT_ONCE, width - first))

        @pl.when(count > first)
        def _(some=some):
            for name, (source, head) in sources.items():
                copy(source.at[rows.request, some, columns_of(head)], rows.scratch[name].at[some])

    of_rows = load(decayed.at[rows.request, 0, columns], ONE_PER_THREAD)
    of_last = decayed[rows.request, 0, rows.head * THREADS + count - 1]
    internals.store(rows.scratch["left"], jnp.exp(of_last - of_rows))
    return jnp.exp(of_last)


def added(rows: Rows, state, row) -> Any:
    """The state with one row folded in."""
    key = by_key(load(rows.scratch["staged_keys"].at[row], KEY_LAYOUT))
    correction = load(rows.scratch["staged_corrections"].at[row, rows.columns], COLUMN_LAYOUT)
    correction = correction * rows.scratch["left"][row]
    return state + key * lax.broadcast_in_dim(correction, state.shape, [1])
