"""Paged attention on Mosaic GPU, for Hopper.

One thread block per (request, key-value head, block of rows, split). The rows of a tile are the
queries of all heads that share one key-value head, so its keys and values are read only once:

    tile row   r = i * group + g      i: token of the block, g: head within the group
    position   lengths[request] + i

    context    |  tile 0  |  tile 1  |  tile 2  |  tile 3  |  tile 4 ...      (kv_tile positions)
    split 0      xxxxxxxx              xxxxxxxx              xxxxxxxx
    split 1                 xxxxxxxx              xxxxxxxx

A tile of the context belongs to the same split at every length, and the splits' results are added
in a fixed order, so a row's bits depend only on its own position and context. Tiles that a window
hides from every row of a thread block are skipped; the others stay with their splits. The splits of
a request form a cluster and combine their results within the kernel; no second kernel is needed.
"""

import functools

from jaxtyping import Array, Float, Int

from pallas_kernels.jax_internals import plgpu
from pallas_kernels.kept import kept
from pallas_kernels.paged_attention import kernel
from pallas_kernels.paged_attention.blocks import BlockSizes, Shape, choose_sizes
from pallas_kernels.paged_attention.plan import Plan, make_plan, require_same_dtype
from pallas_kernels.paged_attention.seen import Mask
from pallas_kernels.refusal import require
from pallas_kernels.tiles import Shapes, named


@kept(static_argnames=("causal", "window", "window_of_block", "filled_batch", "sizes", "interpret"))
def paged_attention(
    query: Float[Array, "batch kv_heads width group head_dim"],
    key_pages: Float[Array, "pages page_size kv_heads head_dim"],
    value_pages: Float[Array, "pages page_size kv_heads head_dim"],
    page_table: Int[Array, "batch max_pages"],
    lengths: Int[Array, " batch"],
    counts: Int[Array, " batch"],
    *,
    causal: bool,
    window: int | None,
    window_of_block: bool = False,
    filled_batch: int | None = None,
    sizes: BlockSizes | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "filled width heads head_dim"]:
    plan = plan_of(
        query,
        key_pages,
        value_pages,
        page_table,
        lengths,
        counts,
        causal=causal,
        window=window,
        window_of_block=window_of_block,
        filled_batch=filled_batch,
        sizes=sizes,
        interpreted=interpret is not None,
    )
    batch, kv_heads, width, group, head_dim = query.shape
    out, *_ = plgpu.kernel(
        named("paged_attention", functools.partial(kernel.attend, plan)),
        out_type=plan.outputs(filled_batch or batch),
        grid=plan.grid,
        grid_names=("request", "head", "rows"),
        cluster=(plan.sizes.splits,),
        cluster_names=("split",),
        num_threads=plan.sizes.warpgroups,
        thread_name="warpgroup",
        scratch_types=plan.scratch(),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(by_row_tile(query, plan), key_pages, value_pages, page_table, lengths, counts)
    return out.reshape(-1, width, kv_heads * group, head_dim)


def plan_of(
    query: Float[Shapes, "batch kv_heads width group head_dim"],
    key_pages: Float[Shapes, "pages page_size kv_heads head_dim"],
    value_pages: Float[Shapes, "pages page_size kv_heads head_dim"],
    page_table: Int[Shapes, "batch max_pages"],
    lengths: Int[Shapes, " batch"],
    counts: Int[Shapes, " batch"],
    *,
    causal: bool,
    window: int | None,
    window_of_block: bool = False,
    filled_batch: int | None = None,
    sizes: BlockSizes | None = None,
    interpreted: bool = False,
) -> Plan:
    """The plan of this call; raises `NotForThisKernel` if the kernel cannot do it."""
    require_same_dtype(query, key_pages, value_pages)
    batch, kv_heads, width, group, head_dim = query.shape
    require(
        filled_batch is None or filled_batch >= batch,
        f"filled_batch {filled_batch}",
        f"at least the batch, {batch}",
    )
    shape = Shape(batch, kv_heads, width, group, head_dim, key_pages.shape[1], page_table.shape[1])
    mask = Mask(causal, window, window_of_block)
    return make_plan(shape, sizes or choose_sizes(shape), query.dtype, mask, interpreted)


def by_row_tile(
    query: Float[Array, "batch kv_heads width group head_dim"], plan: Plan
) -> Float[Array, "batch kv_heads ... head_dim"]:
    """The queries with an axis of row tiles, if these do not overlap."""
    batch, kv_heads, width, group, head_dim = query.shape
    tiles = (plan.tiling.row_tiles, plan.rows) if plan.tiling.even else (width * group,)
    return query.reshape(batch, kv_heads, *tiles, head_dim)
