"""What the kernel does that folds in the first rows of a block: for each a product of its key with
what it corrects, in float32. No row waits for another, so this takes as long as reading and writing
the states. One thread block per request, value head and tile of columns, as in `rows.py`."""

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


def fold_block(keys, corrections, decayed, slots, lengths, counts, states, **scratch: Any) -> None:
    rows = Rows(scratch)
    count, slot = counts[rows.request], slots[rows.request]

    @pl.when(count > 0)
    def _():
        before = rows.state_before(states, slot, lengths[rows.request])
        last = stage_kept(rows, keys, corrections, decayed, count)
        after = lax.fori_loop(0, count, lambda row, state: added(rows, state, row), before * last)
        internals.store(rows.tile_of(states, slot), after)


def stage_kept(rows: Rows, keys, corrections, decayed, count) -> Any:
    """Brings what is folded in, and how much is left of each row and, returned, of the state."""
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
