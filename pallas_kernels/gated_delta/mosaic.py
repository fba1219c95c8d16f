"""The gated delta rule on Mosaic GPU, row after row, with the states in registers (`rows.py`).

One thread block (one warpgroup) per request, value head and tile of 64 columns, because the columns
of a state do not depend on each other. First the block's rows are put into shared memory, then each
is run through the tile. Only loads and stores of single threads are used, so the kernels run on
every GPU since Ampere.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import jax_internals as internals
from pallas_kernels.gated_delta.checks import (
    DIM,
    MOST_ROWS,
    check_fold,
    check_mixer_fold,
    check_mixer_read,
    check_prefill,
    check_read,
)
from pallas_kernels.gated_delta.projected_rows import ProjectedRows
from pallas_kernels.gated_delta.rows import COLUMN_LAYOUT, COLUMNS, ROWS_AT_ONCE, GivenRows
from pallas_kernels.jax_internals import pl, plgpu
from pallas_kernels.kept import kept
from pallas_kernels.tiles import THREADS, named

PREFILLED_ROWS = 32
"""Rows of a long block that are in shared memory at the same time. With fewer, more thread blocks
fit on a multiprocessor."""


@kept(static_argnames=("interpret",))
def delta_read(
    query: Float[Array, "batch width key_heads key_dim"],
    key: Float[Array, "batch width key_heads key_dim"],
    value: Float[Array, "batch width value_heads value_dim"],
    log_decay: Float[Array, "batch width value_heads"],
    beta: Float[Array, "batch width value_heads"],
    state: Float[Array, "slots value_heads key_dim value_dim"],
    slots: Int[Array, " batch"],
    lengths: Int[Array, " batch"],
    *,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "batch width value_heads value_dim"]:
    given = query, key, value, log_decay, beta, state, slots, lengths
    check_read(*given)
    outputs = (jax.ShapeDtypeStruct(value.shape, value.dtype),)
    return launch("delta_read", read, value, outputs, interpret)(*given)[0]


@kept(static_argnames=("interpret",))
def delta_fold(
    key: Float[Array, "batch width key_heads key_dim"],
    value: Float[Array, "batch width value_heads value_dim"],
    log_decay: Float[Array, "batch width value_heads"],
    beta: Float[Array, "batch width value_heads"],
    state: Float[Array, "slots value_heads key_dim value_dim"],
    slots: Int[Array, " batch"],
    lengths: Int[Array, " batch"],
    counts: Int[Array, " batch"],
    *,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "slots value_heads key_dim value_dim"]:
    check_fold(key, value, log_decay, beta, state, slots, lengths, counts)
    states = jax.new_ref(state)
    given = key, value, log_decay, beta, slots, lengths, counts, states
    launch("delta_fold", fold, value, (), interpret)(*given)
    return jax.freeze(states)


@kept(static_argnames=("interpret",))
def delta_prefill(
    query: Float[Array, "batch width key_heads key_dim"],
    key: Float[Array, "batch width key_heads key_dim"],
    value: Float[Array, "batch width value_heads value_dim"],
    log_decay: Float[Array, "batch width value_heads"],
    beta: Float[Array, "batch width value_heads"],
    state: Float[Array, "slots value_heads key_dim value_dim"],
    slots: Int[Array, " batch"],
    lengths: Int[Array, " batch"],
    counts: Int[Array, " batch"],
    *,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[
    Float[Array, "batch width value_heads value_dim"],
    Float[Array, "batch value_heads key_dim value_dim"],
]:
    given = query, key, value, log_decay, beta, state, slots, lengths, counts
    check_prefill(*given)
    outputs = (
        jax.ShapeDtypeStruct(value.shape, value.dtype),
        jax.ShapeDtypeStruct((value.shape[0], *state.shape[1:]), state.dtype),
    )
    return tuple(launch("delta_prefill", prefill, value, outputs, interpret)(*given))


@kept(static_argnames=("interpret",))
def mixer_read(
    inputs: Float[Array, "batch width outputs"],
    tails: Float[Array, "slots recent channels"],
    taps: Float[Array, "taps channels"],
    decay_bias: Float[Array, " value_heads"],
    log_rate: Float[Array, " value_heads"],
    state: Float[Array, "slots value_heads key_dim value_dim"],
    slots: Int[Array, " batch"],
    lengths: Int[Array, " batch"],
    *,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "batch width value_heads value_dim"]:
    given = inputs, tails, taps, decay_bias, log_rate, state, slots, lengths
    check_mixer_read(*given)
    _, value_heads, _, value_dim = state.shape
    out = jax.ShapeDtypeStruct((*inputs.shape[:2], value_heads, value_dim), inputs.dtype)
    scratch = scratch_of_projected(inputs.shape[1], tails.shape[1], KINDS)
    run = launch_over("mixer_read", read_projected, out.shape, (out,), scratch, interpret)
    return run(*given)[0]


@kept(static_argnames=("interpret",))
def mixer_fold(
    inputs: Float[Array, "batch width outputs"],
    tails: Float[Array, "slots recent channels"],
    taps: Float[Array, "taps channels"],
    decay_bias: Float[Array, " value_heads"],
    log_rate: Float[Array, " value_heads"],
    state: Float[Array, "slots value_heads key_dim value_dim"],
    slots: Int[Array, " batch"],
    lengths: Int[Array, " batch"],
    counts: Int[Array, " batch"],
    *,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "slots value_heads key_dim value_dim"]:
    of_rows = inputs, tails, taps, decay_bias, log_rate
    check_mixer_fold(*of_rows, state, slots, lengths, counts)
    _, value_heads, _, value_dim = state.shape
    shape = *inputs.shape[:2], value_heads, value_dim
    states = jax.new_ref(state)
    scratch = scratch_of_projected(inputs.shape[1], tails.shape[1], KINDS[:2])
    run = launch_over("mixer_fold", fold_projected, shape, (), scratch, interpret)
    run(*of_rows, slots, lengths, counts, states)
    return jax.freeze(states)


KINDS = ("normed_keys", "values", "normed_queries")
"""Kinds of rows in shared memory. Queries are needed for outputs only."""


def scratch_of_projected(width: int, recent: int, kinds: tuple[str, ...]) -> dict[str, Any]:
    """Shared memory for rows of each kind, after the convolution's inputs from before the block,
    and for each row's decay and beta."""
    rows = recent + in_groups(width)
    numbers = {kind: plgpu.SMEM((THREADS,), jnp.float32) for kind in ("decays", "betas")}
    return {kind: plgpu.SMEM((rows, DIM), jnp.float32) for kind in kinds} | numbers


def in_groups(rows: int) -> int:
    return -(-rows // ROWS_AT_ONCE) * ROWS_AT_ONCE


def launch(name: str, body, value: Any, outputs: tuple, interpret) -> Any:
    """The kernel, with shared memory for the rows of a block."""
    rows = in_groups(min(value.shape[1], PREFILLED_ROWS if body is prefill else MOST_ROWS))
    kinds = KINDS[:2] if body is fold else KINDS
    scratch = {kind: plgpu.SMEM((rows, DIM), jnp.float32) for kind in kinds}
    return launch_over(name, body, value.shape, outputs, scratch, interpret)


def launch_over(name: str, body, values: tuple, outputs: tuple, scratch: dict, interpret) -> Any:
    """The kernel, with a grid of requests, value heads and tiles of columns for values of this
    shape."""
    batch, _, value_heads, value_dim = values
    return plgpu.kernel(
        named(name, body),
        out_type=outputs,
        grid=(batch, value_heads, value_dim // COLUMNS),
        grid_names=("request", "head", "tile"),
        num_threads=1,
        thread_name="warpgroup",
        scratch_types=scratch,
        interpret=interpret,
    )


def read(query, key, value, log_decay, beta, state, slots, lengths, out, **scratch: Any) -> None:
    rows = GivenRows(scratch, key, value, log_decay, beta, query)
    before = rows.state_before(state, slots[rows.request], lengths[rows.request])
    rows.stage(0)
    rows.run(before, 0, 0, rows.width, out)


def fold(key, value, log_decay, beta, slots, lengths, counts, states, **scratch: Any) -> None:
    rows = GivenRows(scratch, key, value, log_decay, beta)
    count, slot = counts[rows.request], slots[rows.request]

    @pl.when(count > 0)
    def _():
        before = rows.state_before(states, slot, lengths[rows.request])
        rows.stage(0)
        internals.store(rows.tile_of(states, slot), rows.run(before, 0, 0, count))


def read_projected(
    inputs, tails, taps, decay_bias, log_rate, state, slots, lengths, out, **scratch: Any
) -> None:
    rows = ProjectedRows(scratch, inputs, tails, taps, decay_bias, log_rate, slots, lengths)
    rows.stage(rows.width)
    # Only now, so that the registers of the state are free while rows are made. With more than 128
    # per thread, only three thread blocks fit on a multiprocessor.
    before = rows.state_before(state, slots[rows.request], lengths[rows.request])
    rows.run(before, 0, 0, rows.width, out)


def fold_projected(
    inputs, tails, taps, decay_bias, log_rate, slots, lengths, counts, states, **scratch: Any
) -> None:
    rows = ProjectedRows(scratch, inputs, tails, taps, decay_bias, log_rate, slots, lengths)
    count, slot = counts[rows.request], slots[rows.request]

    @pl.when(count > 0)
    def _():
        rows.stage(count)
        before = rows.state_before(states, slot, lengths[rows.request])
        internals.store(rows.tile_of(states, slot), rows.run(before, 0, 0, count))


def prefill(
    query,
    key,
    value,
    log_decay,
    beta,
    state,
    slots,
    lengths,
    counts,
    out,
    after,
    **scratch: Any,
) -> None:
    rows = GivenRows(scratch, key, value, log_decay, beta, query)
    count = counts[rows.request]

    def some_rows(piece, before):
        # If the last piece would reach beyond the width, it starts earlier; rows that it shares
        # with the piece before it are not run twice.
        start = piece * rows.staged
        first = jnp.minimum(start, rows.width - rows.staged)
        rows.stage(first)
        return rows.run(before, first, start - first, jnp.minimum(count - first, rows.staged), out)

    before = rows.state_before(state, slots[rows.request], lengths[rows.request])
    pieces = lax.div(count + (rows.staged - 1), rows.staged)
    internals.store(rows.tile_of(after, rows.request), lax.fori_loop(0, pieces, some_rows, before))

    @pl.loop(count, rows.width)
    def _(row):
        nothing = plgpu.layout_cast(jnp.zeros((COLUMNS,), out.dtype), COLUMN_LAYOUT)
        internals.store(rows.place_in(out, row), nothing)
