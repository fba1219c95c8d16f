"""Paged attention on Mosaic GPU, for Hopper.

One thread block per (slot, key-value head, block of rows, split). The rows of a tile are the
query rows of one key-value head, so that its keys and values are read once for all of them:

    tile row   r = i * group + g      i: query row (token), g: head within the group
    position   lengths[slot] + i

    context    |  tile 0  |  tile 1  |  tile 2  |  tile 3  |  tile 4 ...      (kv_tile positions)
    split 0      xxxxxxxx              xxxxxxxx              xxxxxxxx
    split 1                 xxxxxxxx              xxxxxxxx

A tile always falls to the same split, whatever the length, and the splits' sums are added in one
order: a row's bits depend on its own position and context only. The splits of a slot form one
cluster and exchange their sums through shared memory, so there is no second kernel.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.blocks import TILE_ROWS, BlockSizes, Shape, aligned, choose_sizes, tile
from pallas_kernels.paged_attention.splits import ROWS, Exchange
from pallas_kernels.tiles import require, swizzled, times

MASKED = -1e30


@functools.partial(jax.jit, static_argnames=("causal", "window", "sizes", "interpret"))
def paged_attention(
    query: Float[Array, "slots kv_heads width group head_dim"],
    key_pages: Float[Array, "pages page_size kv_heads head_dim"],
    value_pages: Float[Array, "pages page_size kv_heads head_dim"],
    page_table: Int[Array, "slots max_pages"],
    lengths: Int[Array, " slots"],
    spans: Int[Array, " slots"],
    *,
    causal: bool,
    window: int | None,
    sizes: BlockSizes | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "slots width heads head_dim"]:
    slots, kv_heads, width, group, head_dim = query.shape
    shape = Shape(slots, kv_heads, width, group, head_dim, key_pages.shape[1], page_table.shape[1])
    require(window is None, "no window")
    require(group <= TILE_ROWS, f"at most {TILE_ROWS} query heads per key-value head")
    require(head_dim in (64, 128), "head_dim 64 or 128")
    require(query.dtype.itemsize == 2, "16-bit numbers")
    require(query.dtype == key_pages.dtype == value_pages.dtype, "query and pages of one dtype")
    sizes = sizes or choose_sizes(shape)
    require(aligned(shape, sizes.splits), "fewer splits: 128-byte rows of one token's heads")
    tiling = tile(shape, sizes)
    exchange = Exchange(sizes.splits, head_dim, sizes.warpgroups)
    dtype = query.dtype
    rows = tiling.span * group
    staged = rows % 8 != 0 or not tiling.even
    stages, kv_tile, warpgroups = sizes.stages, sizes.kv_tile, sizes.warpgroups
    scale = head_dim**-0.5 * math.log2(math.e)

    def kernel(
        q_gmem, k_gmem, v_gmem, table_gmem, lengths_gmem, spans_gmem, o_gmem, *refs, scratch
    ):
        slot = lax.axis_index("slot")
        head = lax.axis_index("head")
        row_block = lax.axis_index("rows")
        split = lax.axis_index("split")
        wg = lax.axis_index("wg")
        row_tile = row_block * warpgroups + wg
        # The last tile is moved back to end with the block: it repeats rows, bit for bit.
        first = jnp.minimum(row_tile * tiling.span, width - tiling.span)
        length = lengths_gmem[slot]
        if causal:
            end = length + jnp.minimum((row_block + 1) * warpgroups * tiling.span, width)
        else:
            end = length + width
        kept_end = length + spans_gmem[slot]
        end = jnp.minimum(end, kept_end)
        tiles = lax.div(end + (kv_tile - 1), kv_tile)
        steps = lax.div(tiles - split + (sizes.splits - 1), sizes.splits)

        def positions(step):
            base = (split + step * sizes.splits) * kv_tile
            return [base + j * tiling.copy_rows for j in range(tiling.copies)]

        def pages_of(step):
            entries = [
                jnp.minimum(lax.div(at, shape.page_size), shape.max_pages - 1)
                for at in positions(step)
            ]
            return [table_gmem[slot, entry] for entry in entries]

        def fetch(step, pages):
            stage = lax.rem(step, stages)
            for j, (at, page) in enumerate(zip(positions(step), pages)):
                source = (page, pl.ds(lax.rem(at, shape.page_size), tiling.copy_rows), head)
                target = (stage, pl.ds(j * tiling.copy_rows, tiling.copy_rows))
                for pool, smem, bar in (
                    (k_gmem, scratch["k"], scratch["k_bar"]),
                    (v_gmem, scratch["v"], scratch["v_bar"]),
                ):
                    plgpu.copy_gmem_to_smem(pool.at[source], smem.at[target], bar.at[stage])

        def start(step, pages):
            pl.when(step < steps)(lambda: fetch(step, pages))

        @pl.when(wg == 0)
        def _():
            for step, pages in enumerate(first_pages):
                start(jnp.int32(step), pages)

        if tiling.even:
            q_source = q_gmem.at[slot, head, jnp.minimum(row_tile, tiling.row_tiles - 1)]
        else:
            q_source = q_gmem.at[slot, head, pl.ds(first * group, rows)]
        q_smem = scratch["q"].at[wg]
        q_bar = scratch["q_bar"]
        if staged:
            raw = scratch["q_raw"].at[wg]
            plgpu.copy_gmem_to_smem(q_source, scratch["q_raw"].at[wg, pl.ds(0, rows)], q_bar)
            plgpu.barrier_wait(q_bar)
            q_smem[...] = plgpu.load(raw, layout=plgpu.Layout.WGMMA, optimized=False)
            plgpu.commit_smem()
        else:
            plgpu.copy_gmem_to_smem(q_source, scratch["q"].at[wg, pl.ds(0, rows)], q_bar)
            plgpu.barrier_wait(q_bar)

        if causal:
            row = plgpu.broadcasted_iota(jnp.int32, (TILE_ROWS,), 0, layout=ROWS)
            last = jnp.minimum(length + first + lax.div(row, group), kept_end - 1)

        def seen(base):
            position = base + plgpu.broadcasted_iota(
                jnp.int32, (TILE_ROWS, kv_tile), 1, layout=plgpu.Layout.WGMMA
            )
            if causal:
                return position <= lax.broadcast_in_dim(last, position.shape, [0])
            return position < end

        def body(step, carry):
            m, l, acc = carry
            base = (split + step * sizes.splits) * kv_tile
            stage = lax.rem(step, stages)
            # One row tile refills at once; several wait for each other, one tile late.
            done = step if warpgroups == 1 else step - 1
            pages = pages_of(done + stages)
            if warpgroups > 1:
                refill(done, pages)
            plgpu.barrier_wait(scratch["k_bar"].at[stage])
            k_tile, v_tile = scratch["k"].at[stage], scratch["v"].at[stage]

            def scores(acc_ref):
                plgpu.wgmma(acc_ref, q_smem, k_tile.T)
                return acc_ref[...]

            s = pl.run_scoped(scores, plgpu.ACC((TILE_ROWS, kv_tile), jnp.float32))
            s = jnp.where(seen(base), s, MASKED)
            m_new = jnp.maximum(m, s.max(axis=1))
            alpha = jnp.exp2((m - m_new) * scale)
            p = jnp.exp2(s * scale - lax.broadcast_in_dim(m_new * scale, s.shape, [0]))
            l = l * alpha + p.sum(axis=1)
            acc = acc * lax.broadcast_in_dim(alpha, acc.shape, [0])
            plgpu.barrier_wait(scratch["v_bar"].at[stage])
            clear_tail(v_tile, base, end)
            acc = times(acc, p.astype(dtype), v_tile, interpret is not None)
            if warpgroups > 1:
                release(step)
            else:
                refill(done, pages)
            return m_new, l, acc

        def clear_tail(v_tile, base, end):
            """Rows of the last tile that nobody may see: 0 * NaN would be NaN."""

            @pl.when(base + kv_tile > end)
            def _():
                @pl.when(wg == 0)
                def _():
                    position = base + plgpu.broadcasted_iota(
                        jnp.int32, (kv_tile, head_dim), 0, layout=plgpu.Layout.WGMMA
                    )
                    v = plgpu.load(v_tile, layout=plgpu.Layout.WGMMA)
                    v_tile[...] = jnp.where(position < end, v, jnp.zeros_like(v))
                    plgpu.commit_smem()

                if warpgroups > 1:
                    plgpu.barrier_arrive(scratch["tail_bar"])
                    plgpu.barrier_wait(scratch["tail_bar"])

        def refill(step, pages):
            """Loads the tile that follows into the stage that `step` has left."""

            @pl.when((step >= 0) & (step + stages < steps))
            def _():
                if warpgroups > 1:
                    plgpu.barrier_wait(scratch["free_bar"].at[lax.rem(step, stages)])

                @pl.when(wg == 0)
                def _():
                    fetch(step + stages, pages)

        def release(step):
            @pl.when(step + stages < steps)
            def _():
                plgpu.barrier_arrive(scratch["free_bar"].at[lax.rem(step, stages)])

        full = lambda shape_, value, layout: plgpu.layout_cast(
            jnp.full(shape_, value, jnp.float32), layout
        )
        m, l, acc = lax.fori_loop(
            0,
            steps,
            body,
            (
                full((TILE_ROWS,), MASKED, ROWS),
                full((TILE_ROWS,), 0.0, ROWS),
                full((TILE_ROWS, head_dim), 0.0, plgpu.Layout.WGMMA),
            ),
        )
        tile_buffers = [buffer.at[slot, head, row_tile] for buffer in buffers]
        out = exchange.combine(m * scale, l, acc, split, scratch.get("split_bar"), tile_buffers)
        o_smem = scratch["o"].at[wg]
        o_smem[...] = out.astype(dtype)
        plgpu.commit_smem()
        columns = pl.ds(split * exchange.columns, exchange.columns)
        for i in range(tiling.span):
            plgpu.copy_smem_to_gmem(
                o_smem.at[pl.ds(i * group, group)], o_gmem.at[slot, first + i, head, :, columns]
            )
        plgpu.wait_smem_to_gmem(0)

    scratch = dict(
        q=swizzled((warpgroups, TILE_ROWS, head_dim), dtype),
        k=swizzled((stages, kv_tile, head_dim), dtype),
        v=swizzled((stages, kv_tile, head_dim), dtype),
        o=plgpu.SMEM((warpgroups, TILE_ROWS, exchange.columns), dtype),
        q_bar=plgpu.Barrier(num_arrivals=warpgroups),
        k_bar=plgpu.Barrier(num_arrivals=tiling.copies, num_barriers=stages),
        v_bar=plgpu.Barrier(num_arrivals=tiling.copies, num_barriers=stages),
        **exchange.scratch(),
    )
    if staged:
        scratch["q_raw"] = plgpu.SMEM((warpgroups, TILE_ROWS, head_dim), dtype)
    if warpgroups > 1:
        scratch["tail_bar"] = plgpu.Barrier(num_arrivals=warpgroups)
        scratch["free_bar"] = plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages)

    def body(*refs, **named):
        kernel(*refs, scratch=named)

    body.__name__ = "paged_attention"
    out_type = jax.ShapeDtypeStruct((slots, width, kv_heads, group, head_dim), dtype)
    outputs = (out_type, *exchange.buffers(slots, kv_heads, tiling.row_blocks * warpgroups))
    out, *_ = plgpu.kernel(
        body,
        out_type=outputs,
        grid=(slots, kv_heads, tiling.row_blocks),
        grid_names=("slot", "head", "rows"),
        cluster=(sizes.splits,),
        cluster_names=("split",),
        num_threads=warpgroups,
        thread_name="wg",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(
        query.reshape(
            slots,
            kv_heads,
            *((tiling.row_tiles, rows) if tiling.even else (width * group,)),
            head_dim,
        ),
        key_pages,
        value_pages,
        page_table,
        lengths,
        spans,
    )
    return out.reshape(slots, width, kv_heads * group, head_dim)
