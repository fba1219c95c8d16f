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
import math
from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels.fp8_product.rounded import RoundedRows, Rounding
from pallas_kernels.fp8_product.rounding import round_rows
from pallas_kernels.jax_internals import plgpu
from pallas_kernels.kept import kept
from pallas_kernels.paged_attention import kernel
from pallas_kernels.paged_attention.blocks import BlockSizes, Shape, choose_sizes
from pallas_kernels.paged_attention.plan import Plan, can_round, make_plan, require_same_dtype
from pallas_kernels.paged_attention.seen import Mask
from pallas_kernels.refusal import require
from pallas_kernels.tiles import Shapes, named


def paged_attention(
    query: Float[Array, "batch kv_heads width group head_dim"],
    *others: Array,
    rounding: Rounding | None = None,
    **options: Any,
) -> Float[Array, "filled width heads head_dim"] | RoundedRows:
    if rounding == "pieces" and rounds_itself(query.shape, options.get("sizes")):
        numbers, scales = paged_attention_call(query, *others, rounds=True, **options)
        return RoundedRows(numbers.reshape(*numbers.shape[:2], -1), scales, query.dtype)
    rows = paged_attention_call(query, *others, **options)[0]
    if rounding is None:
        return rows
    flat = rows.reshape(-1, math.prod(rows.shape[2:]))
    numbers, scales = round_rows(flat, rounding, options.get("interpret"))
    tokens = rows.shape[:2]
    return RoundedRows(numbers[: len(flat)].reshape(*tokens, -1), scales, query.dtype)


def rounds_itself(shape: tuple[int, ...], sizes: BlockSizes | None = None) -> bool:
    """Whether the kernel can round the result of queries of this shape while it writes it."""
    batch, kv_heads, width, group, head_dim = shape
    known = Shape(batch, kv_heads, width, group, head_dim, page_size=0, max_pages=0)
    return can_round(known, sizes or choose_sizes(known))


STATIC = "causal", "window", "window_of_block", "filled_batch", "rounds", "sizes", "interpret"


@kept(static_argnames=STATIC)
def paged_attention_call(
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
    rounds: bool = False,
    sizes: BlockSizes | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Array, ...]:
    """The result, and its scales if the kernel rounds it to 8 bits."""
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
        rounds=rounds,
        sizes=sizes,
        interpreted=interpret is not None,
    )
    batch, kv_heads, width, group, head_dim = query.shape
    out, *others = plgpu.kernel(
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
    return out.reshape(-1, width, kv_heads * group, head_dim), *others[: int(rounds)]


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
    rounding: Rounding | None = None,
    rounds: bool = False,
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
    return make_plan(shape, sizes or choose_sizes(shape), query.dtype, mask, interpreted, rounds)


def by_row_tile(
    query: Float[Array, "batch kv_heads width group head_dim"], plan: Plan
) -> Float[Array, "batch kv_heads ... head_dim"]:
    """The queries with an axis of row tiles, if these do not overlap."""
    batch, kv_heads, width, group, head_dim = query.shape
    tiles = (plan.shape.row_tiles, plan.rows) if plan.shape.even else (width * group,)
    return query.reshape(batch, kv_heads, *tiles, head_dim)
