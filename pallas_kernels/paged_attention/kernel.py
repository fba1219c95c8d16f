"""The body of the paged attention kernel: what one warpgroup of a thread block does."""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.jax_internals import Accumulator, pl, plgpu
from pallas_kernels.paged_attention.blocks import TILE_ROWS
from pallas_kernels.paged_attention.loading import Loader
from pallas_kernels.paged_attention.plan import Plan
from pallas_kernels.paged_attention.splits import ROW_LAYOUT
from pallas_kernels.tiles import load, times

MASKED = -1e30
TILE_LAYOUT = plgpu.Layout.WGMMA


def attend(
    plan: Plan, query, keys, values, table, lengths, counts, out, *buffers, **scratch
) -> None:
    plan.exchange.init_barriers(scratch)
    request, head = lax.axis_index("request"), lax.axis_index("head")
    row_block, split = lax.axis_index("rows"), lax.axis_index("split")
    warpgroup = lax.axis_index("warpgroup")
    row_tile = row_block * plan.sizes.warpgroups + warpgroup
    # If the last tile would reach beyond the width, it starts earlier; rows that the tile before it
    # has as well are not stored twice.
    first = jnp.minimum(row_tile * plan.tiling.span, plan.shape.width - plan.tiling.span)

    loader = Loader(plan, keys, values, table, scratch, request, head, split, warpgroup)
    # Page ids are loaded before the length has arrived, so that the two waits overlap.
    pages = [loader.pages(jnp.int32(step)) for step in range(plan.sizes.stages)]
    length = lengths[request]
    kept_end = length + counts[request]
    end = jnp.minimum(length + rows_up_to(plan, row_block), kept_end)
    steps = steps_of(plan, end, split)
    loader.prefetch_first(pages, steps)
    load_queries(plan, query, scratch, (request, head, row_tile, first, warpgroup))

    last = last_visible(plan, length + first, kept_end)
    sums = lax.fori_loop(
        0,
        steps,
        lambda step, sums: attend_tile(plan, loader, step, steps, sums, last, end),
        (
            filled((TILE_ROWS,), MASKED, ROW_LAYOUT),
            filled((TILE_ROWS,), 0.0, ROW_LAYOUT),
            filled((TILE_ROWS, plan.shape.head_dim), 0.0, TILE_LAYOUT),
        ),
    )
    row_buffers = [buffer.at[request, head, row_tile] for buffer in buffers]
    attended = plan.exchange.combine(sums, split, warpgroup, scratch, row_buffers)
    o_tile = scratch["q_raw" if plan.output_reuses_queries else "o"].at[warpgroup]
    store(plan, attended, out.at[request], o_tile, (row_tile, first, head, split))


def filled(shape, value, layout):
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def rows_up_to(plan: Plan, row_block):
    """How many of the block's tokens the queries of this row block may see."""
    if not plan.causal:
        return plan.shape.width
    rows = plan.sizes.warpgroups * plan.tiling.span
    return jnp.minimum((row_block + 1) * rows, plan.shape.width)


def steps_of(plan: Plan, end, split):
    """How many of the tiles before `end` belong to this split."""
    sizes = plan.sizes
    tiles = lax.div(end + (sizes.kv_tile - 1), sizes.kv_tile)
    return lax.div(tiles - split + (sizes.splits - 1), sizes.splits)


def load_queries(plan: Plan, query, scratch: dict[str, Any], indices) -> None:
    """Copies this warpgroup's row tile of queries to shared memory."""
    request, head, row_tile, first, warpgroup = indices
    if plan.tiling.even:
        source = query.at[request, head, jnp.minimum(row_tile, plan.tiling.row_tiles - 1)]
    else:
        source = query.at[request, head, pl.ds(first * plan.shape.group, plan.rows)]
    name = "q_raw" if plan.staged else "q"
    target = scratch[name].at[warpgroup, pl.ds(0, plan.rows)]
    plgpu.copy_gmem_to_smem(source, target, scratch["q_bar"])
    plgpu.barrier_wait(scratch["q_bar"])
    if plan.staged:
        raw = load(scratch["q_raw"].at[warpgroup], TILE_LAYOUT)
        scratch["q"].at[warpgroup][...] = raw
        plgpu.commit_smem()


def last_visible(plan: Plan, first_position, kept_end):
    """The last position that each row sees; None if all rows see the same positions."""
    if not plan.causal:
        return None
    row = plgpu.broadcasted_iota(jnp.int32, (TILE_ROWS,), 0, layout=ROW_LAYOUT)
    return jnp.minimum(first_position + lax.div(row, plan.shape.group), kept_end - 1)


def attend_tile(plan: Plan, loader: Loader, step, steps, sums, last, end):
    """Adds one tile of keys and values to the accumulator (online softmax with rescaling)."""
    m, l, acc = sums
    scratch, shared = loader.scratch, plan.sizes.warpgroups > 1
    # A single warpgroup refills a stage as soon as it has used it. Warpgroups that share the stages
    # refill one a step later, so that they do not wait for the slowest of them at once.
    finished = step - 1 if shared else step
    pages = loader.pages(finished + plan.sizes.stages)
    if shared:
        loader.refill(finished, pages, steps)
    base, stage = loader.base(step), lax.rem(step, plan.sizes.stages)

    plgpu.barrier_wait(scratch["k_bar"].at[stage])
    s = scores(scratch["q"].at[loader.warpgroup], scratch["k"].at[stage], plan.sizes.kv_tile)
    # Scaled before masking. Otherwise the multiplication of a masked score (-1e30) could be fused
    # with the subtraction below, whose rounding error would then overflow in exp2.
    s = jnp.where(visible(base, s.shape, last, end), s * plan.scale, MASKED)
    m_new = jnp.maximum(m, s.max(axis=1))
    alpha = jnp.exp2(m - m_new)
    p = jnp.exp2(s - lax.broadcast_in_dim(m_new, s.shape, [0]))
    l = l * alpha + p.sum(axis=1)
    acc = acc * lax.broadcast_in_dim(alpha, acc.shape, [0])

    plgpu.barrier_wait(scratch["v_bar"].at[stage])
    v_tile = scratch["v"].at[stage]
    clear_tail(plan, v_tile, base, end, loader)
    acc = times(acc, p.astype(plan.dtype), v_tile, plan.interpreted)
    if shared:
        loader.release(step, steps)
    else:
        loader.refill(finished, pages, steps)
    return m_new, l, acc


def scores(q_tile, k_tile, kv_tile: int):
    def multiply(acc):
        plgpu.wgmma(acc, q_tile, k_tile.T)
        return acc[...]

    return pl.run_scoped(multiply, Accumulator((TILE_ROWS, kv_tile), jnp.float32))


def visible(base, shape, last, end):
    """Mask of the scores of a tile that starts at position `base`."""
    position = base + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=TILE_LAYOUT)
    if last is None:
        return position < end
    return position <= lax.broadcast_in_dim(last, shape, [0])


def clear_tail(plan: Plan, v_tile, base, end, loader: Loader) -> None:
    """Zeroes the values at positions that no token may see: 0 (their weight) * NaN is NaN."""

    @pl.when(base + plan.sizes.kv_tile > end)
    def _():
        @pl.when(loader.warpgroup == 0)
        def _():
            v = plgpu.load(v_tile, layout=TILE_LAYOUT)
            position = base + plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=TILE_LAYOUT)
            v_tile[...] = jnp.where(position < end, v, jnp.zeros_like(v))
            plgpu.commit_smem()

        if plan.sizes.warpgroups > 1:
            plgpu.barrier_arrive(loader.scratch["tail_bar"])
            plgpu.barrier_wait(loader.scratch["tail_bar"])


def store(plan: Plan, attended, out, o_tile, indices) -> None:
    """Writes a row tile to the output [width, kv_heads, group, head_dim], token by token.

    A row of the tile is one head of the group for one token.
    """
    row_tile, first, head, split = indices
    group, width = plan.shape.group, plan.exchange.columns
    o_tile[...] = attended.astype(plan.dtype)
    plgpu.commit_smem()
    columns = pl.ds(split * width, width)

    def store_token(i: int) -> None:
        plgpu.copy_smem_to_gmem(
            o_tile.at[pl.ds(i * group, group)], out.at[first + i, head, :, columns]
        )

    for i in range(plan.tiling.span):
        if plan.repeats:
            pl.when(first + i >= row_tile * plan.tiling.span)(functools.partial(store_token, i))
        else:
            store_token(i)
    plgpu.wait_smem_to_gmem(0)
