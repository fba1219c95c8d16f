"""The body of the paged attention kernel: what one warpgroup of a thread block does.

It holds 64 rows of queries q in shared memory, and for each of them a maximum m, a sum of weights l
and an accumulator acc in registers. For each tile of keys k and values v (online softmax):

    s   = q k^T * scale, masked                       wgmma
    m'  = max(m, row maximum of s)
    p   = exp2(s - m')
    l   = l * exp2(m - m') + row sum of p
    acc = acc * exp2(m - m') + p v                    wgmma

The first warpgroup also starts the bulk copies of later tiles (`loading.py`). In the epilogue the
splits combine their results (`splits.py`), and each token's heads are written by a bulk copy
(`storing.py`), rounded to 8 bits if the next product wants that (`rounding.py`).
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.jax_internals import Accumulator, pl, plgpu
from pallas_kernels.paged_attention.blocks import TILE_ROWS
from pallas_kernels.paged_attention.loading import Loader
from pallas_kernels.paged_attention.plan import Plan
from pallas_kernels.paged_attention.rounding import TILE_LAYOUT, in_8_bits
from pallas_kernels.paged_attention.splits import ROW_LAYOUT, tiles_of_split
from pallas_kernels.paged_attention.storing import Place, store, store_scales
from pallas_kernels.tiles import load, times

MASKED = -1e30
SHORT_TILE_LAYOUT = plgpu.Layout.WGMMA_TRANSPOSED


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The positions that are visible to a row block, [start, end), and to each of its rows,
    [first, last]. A bound that hides nothing is None."""

    first: Any
    last: Any
    start: Any
    end: Any


def attend(
    plan: Plan, query, keys, values, table, lengths, counts, out, *others, **scratch
) -> None:
    plan.exchange.init_barriers(scratch)
    request, head = lax.axis_index("request"), lax.axis_index("head")
    row_block, split = lax.axis_index("rows"), lax.axis_index("split")
    warpgroup = lax.axis_index("warpgroup")
    row_tile = row_block * plan.sizes.warpgroups + warpgroup
    # If the last tile would reach beyond the width, it starts earlier; rows that it shares with the
    # tile before it are not stored twice.
    first = jnp.minimum(row_tile * plan.shape.span, plan.shape.width - plan.shape.span)

    # Before the first tiles: later the queries would arrive only after all of them.
    begin_queries(plan, query, scratch, (request, head, row_tile, first, warpgroup))
    skipped = steps_before_window(plan, lengths, request, row_block, split)
    loader = Loader(plan, keys, values, table, scratch, request, head, split, warpgroup, skipped)
    # Page ids are loaded before the length has arrived, so that the two waits overlap.
    pages = [loader.pages(jnp.int32(step)) for step in range(plan.sizes.stages)]
    length = lengths[request]
    kept_end = length + counts[request]
    end = jnp.minimum(length + rows_up_to(plan, row_block), kept_end)
    steps = steps_of(plan, end, split)
    if skipped is not None:
        steps -= skipped
    loader.prefetch_first(pages, steps)
    finish_queries(plan, scratch, warpgroup)

    bounds = Bounds(
        first=first_visible(plan, length, first),
        last=last_visible(plan, length + first, kept_end),
        start=plan.mask.first_seen(length, first_token(plan, row_block)),
        end=end,
    )
    no_sums = (
        filled((TILE_ROWS,), MASKED, ROW_LAYOUT),
        filled((TILE_ROWS,), 0.0, ROW_LAYOUT),
        filled((TILE_ROWS, plan.shape.head_dim), 0.0, TILE_LAYOUT),
    )
    attend_to = functools.partial(attend_tile, plan, loader, bounds, steps)
    sums, _ = lax.fori_loop(0, steps, attend_to, (no_sums, loader.pages_after(jnp.int32(-1))))
    scales, buffers = (others[0], others[1:]) if plan.rounds else (None, others)
    row_buffers = [buffer.at[request, head, row_tile] for buffer in buffers]
    attended = plan.exchange.combine(sums, split, warpgroup, scratch, row_buffers)
    o_tile = scratch["q_raw" if plan.output_reuses_queries else "o"].at[warpgroup]
    place = Place(request, head, row_tile, first, split)
    if scales is None:
        store(plan, attended.astype(plan.dtype), out, o_tile, place)
    else:
        numbers, of_rows = in_8_bits(attended, plan.dtype)
        store_scales(plan, of_rows, scales, out.shape[0] * plan.shape.width, place)
        store(plan, numbers, out, o_tile, place)


def filled(shape, value, layout):
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def rows_up_to(plan: Plan, row_block):
    """How many of the block's tokens the queries of this row block may see."""
    if not plan.mask.causal:
        return plan.shape.width
    rows = plan.sizes.warpgroups * plan.shape.span
    return jnp.minimum((row_block + 1) * rows, plan.shape.width)


def steps_of(plan: Plan, end, split):
    """How many of the tiles before `end` belong to this split."""
    sizes = plan.sizes
    tiles = lax.div(end + (sizes.kv_tile - 1), sizes.kv_tile)
    return tiles_of_split(tiles, split, sizes.splits)


def first_token(plan: Plan, row_block):
    """The first token of the block whose queries are in this row block."""
    rows = plan.sizes.warpgroups * plan.shape.span
    return jnp.minimum(row_block * rows, plan.shape.width - plan.shape.span)


def steps_before_window(plan: Plan, lengths, request, row_block, split):
    """How many of the split's first tiles are hidden from all rows of the row block. None without
    a window, so that no load has to wait for the length."""
    if plan.mask.window is None:
        return None
    start = plan.mask.first_seen(lengths[request], first_token(plan, row_block))
    before = lax.div(start, plan.sizes.kv_tile)
    return tiles_of_split(before, split, plan.sizes.splits)


def begin_queries(plan: Plan, query, scratch: dict[str, Any], indices) -> None:
    """Starts the bulk copy of this warpgroup's row tile of queries to shared memory."""
    request, head, row_tile, first, warpgroup = indices
    if plan.shape.even:
        source = query.at[request, head, jnp.minimum(row_tile, plan.shape.row_tiles - 1)]
    else:
        source = query.at[request, head, pl.ds(first * plan.shape.group, plan.rows)]
    name = "q_raw" if plan.shape.staged else "q"
    target = scratch[name].at[warpgroup, pl.ds(0, plan.rows)]
    plgpu.copy_gmem_to_smem(source, target, scratch["q_bar"])


def finish_queries(plan: Plan, scratch: dict[str, Any], warpgroup) -> None:
    """Waits for the queries of all warpgroups."""
    plgpu.barrier_wait(scratch["q_bar"])
    if plan.shape.staged:
        raw = load(scratch["q_raw"].at[warpgroup], TILE_LAYOUT)
        scratch["q"].at[warpgroup][...] = raw
        plgpu.commit_smem()


def first_visible(plan: Plan, length, first):
    """The first position that each row sees; one number if all rows see the same from there on, and
    None without a window."""
    if plan.mask.window is None or plan.mask.window_of_block:
        return plan.mask.first_seen(length, first)
    return plan.mask.first_seen(length, first + token_of_row(plan))


def last_visible(plan: Plan, first_position, kept_end):
    """The last position that each row sees; None if all rows see the same positions."""
    if not plan.mask.causal:
        return None
    return jnp.minimum(first_position + token_of_row(plan), kept_end - 1)


def token_of_row(plan: Plan):
    row = plgpu.broadcasted_iota(jnp.int32, (TILE_ROWS,), 0, layout=ROW_LAYOUT)
    return lax.div(row, plan.shape.group)


def attend_tile(plan: Plan, loader: Loader, bounds: Bounds, steps, step, carried):
    """Adds one tile of keys and values to the accumulator (online softmax with rescaling), and
    refills stages. The page ids for that have been loaded one step before."""
    (m, l, acc), pages = carried
    scratch, shared = loader.scratch, plan.sizes.warpgroups > 1
    finished, next_pages = loader.finished(step), loader.pages_after(step)
    if shared:
        loader.refill(finished, pages, steps)
    base, stage = loader.base(step), lax.rem(step, plan.sizes.stages)

    plgpu.barrier_wait(scratch["k_bar"].at[stage])
    s = scores(scratch["q"].at[loader.warpgroup], scratch["k"].at[stage], plan.sizes.kv_tile)
    if not shared:
        loader.refill(finished, pages, steps, ("k",))
    # Scaled before masking. Otherwise the multiplication of a masked score (-1e30) could be fused
    # with the subtraction below, whose rounding error would then overflow in exp2.
    s = jnp.where(visible(base, s.shape, bounds), s * plan.scale, MASKED)
    m_new = jnp.maximum(m, s.max(axis=1))
    alpha = jnp.exp2(m - m_new)
    p = jnp.exp2(s - lax.broadcast_in_dim(m_new, s.shape, [0]))
    l = l * alpha + p.sum(axis=1)
    acc = acc * lax.broadcast_in_dim(alpha, acc.shape, [0])

    plgpu.barrier_wait(scratch["v_bar"].at[stage])
    v_tile = scratch["v"].at[stage]
    clear_unseen(plan, v_tile, base, bounds, loader)
    acc = times(acc, p.astype(plan.dtype), v_tile, plan.interpreted)
    if shared:
        loader.release(step, steps)
    else:
        loader.refill(finished, pages, steps, ("v",))
    return (m_new, l, acc), next_pages


def scores(q_tile, k_tile, kv_tile: int):
    def multiply(acc):
        plgpu.wgmma(acc, q_tile, k_tile.T)
        return acc[...]

    return pl.run_scoped(multiply, Accumulator((TILE_ROWS, kv_tile), jnp.float32))


def visible(base, shape, bounds: Bounds):
    """Mask of the scores of a tile that starts at position `base`."""
    position = base + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=TILE_LAYOUT)
    if bounds.last is None:
        seen = position < bounds.end
    else:
        seen = position <= lax.broadcast_in_dim(bounds.last, shape, [0])
    if bounds.first is None:
        return seen
    return seen & (position >= by_row(bounds.first, shape))


def by_row(bound, shape):
    """A bound that can be compared with scores of this shape, from one per row or one for all."""
    return lax.broadcast_in_dim(bound, shape, [0]) if bound.ndim else bound


def clear_unseen(plan: Plan, v_tile, base, bounds: Bounds, loader: Loader) -> None:
    """Zeroes the values at positions that no token may see: 0 (their weight) * NaN is NaN."""
    start, end = bounds.start, bounds.end
    some_unseen = base + plan.sizes.kv_tile > end
    if start is not None:
        some_unseen |= base < start

    @pl.when(some_unseen)
    def _():
        @pl.when(loader.warpgroup == 0)
        def _():
            # The layout has 64 rows. A tile of fewer positions is loaded transposed instead.
            short = plan.sizes.kv_tile % TILE_ROWS != 0
            tile, layout = (v_tile.T, SHORT_TILE_LAYOUT) if short else (v_tile, TILE_LAYOUT)
            of_position = layout.reduce(0 if short else 1)
            v = plgpu.load(tile, layout=layout)
            # Numbered along one axis: a two-axis iota counts up within a thread's pair of numbers,
            # but in the transposed layout both numbers of a pair belong to one position.
            position = base + plgpu.broadcasted_iota(
                jnp.int32, (plan.sizes.kv_tile,), 0, layout=of_position
            )
            seen = position < end
            if start is not None:
                seen &= position >= start
            seen = lax.broadcast_in_dim(seen, v.shape, [int(short)])
            tile[...] = jnp.where(seen, v, jnp.zeros_like(v))
            plgpu.commit_smem()

        if plan.sizes.warpgroups > 1:
            plgpu.barrier_arrive(loader.scratch["tail_bar"])
            plgpu.barrier_wait(loader.scratch["tail_bar"])
