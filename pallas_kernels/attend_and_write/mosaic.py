"""`attend_and_write` on Mosaic GPU: paged attention whose thread blocks norm, rotate and write the
block's own tokens (`paged_attention/own_tokens.py`)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.fp8_product.rounded import RoundedRows, Rounding
from pallas_kernels.jax_internals import plgpu
from pallas_kernels.kept import kept
from pallas_kernels.paged_attention import kernel
from pallas_kernels.paged_attention.blocks import TILE_ROWS, BlockSizes, Shape, choose_sizes
from pallas_kernels.paged_attention.plan import EIGHT, Plan, can_round, make_plan
from pallas_kernels.paged_attention.seen import Mask
from pallas_kernels.refusal import require
from pallas_kernels.tiles import Shapes, named

HEAD_DIM = 128
NAMES = "qkv", "query_norm", "key_norm", "cos", "sin"


def attend_and_write(
    qkv: Float[Array, "filled width fused"],
    *others: Array,
    rounding: Rounding | None = None,
    **options: Any,
) -> tuple[
    Float[Array, "filled width heads head_dim"] | RoundedRows,
    Float[Array, "pages page_size kv_heads head_dim"],
    Float[Array, "pages page_size kv_heads head_dim"],
]:
    rows, *scales, keys, values = attend_and_write_call(
        qkv, *others, rounds=rounding is not None, **options
    )
    if not scales:
        return rows, keys, values
    return RoundedRows(rows.reshape(*rows.shape[:2], -1), *scales, qkv.dtype), keys, values


STATIC = "eps", "causal", "window", "window_of_block", "filled_batch", "rounds", "interpret"


@kept(static_argnames=(*STATIC, "sizes"))
def attend_and_write_call(
    qkv: Float[Array, "filled width fused"],
    query_norm: Float[Array, " head_dim"],
    key_norm: Float[Array, " head_dim"],
    cos: Float[Array, "batch width half"],
    sin: Float[Array, "batch width half"],
    key_pages: Float[Array, "pages page_size kv_heads head_dim"],
    value_pages: Float[Array, "pages page_size kv_heads head_dim"],
    page_table: Int[Array, "batch max_pages"],
    lengths: Int[Array, " batch"],
    counts: Int[Array, " batch"],
    *,
    eps: float,
    causal: bool,
    window: int | None,
    window_of_block: bool = False,
    filled_batch: int | None = None,
    rounds: bool = False,
    sizes: BlockSizes | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Array, ...]:
    """The result, its scales if the kernel rounds it to 8 bits, and the pages."""
    plan = plan_of(
        qkv,
        query_norm,
        key_norm,
        cos,
        sin,
        key_pages,
        value_pages,
        page_table,
        lengths,
        counts,
        eps=eps,
        causal=causal,
        window=window,
        window_of_block=window_of_block,
        rounding="pieces" if rounds else None,
        sizes=sizes,
        interpreted=interpret is not None,
    )
    shape, batch = plan.shape, lengths.shape[0]
    keys, values = jax.new_ref(key_pages), jax.new_ref(value_pages)
    missing = (0, 0), (0, plan.head_rows - shape.width), (0, 0)
    angles = (jnp.pad(x, missing) if plan.head_rows > shape.width else x for x in (cos, sin))
    heads = shape.kv_heads * (shape.group + 2)
    out, *others = plgpu.kernel(
        named("attend_and_write", functools.partial(kernel.attend_own, plan, NAMES)),
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
    )(
        qkv.reshape(*qkv.shape[:2], heads, shape.head_dim),
        *(query_norm, key_norm, *angles),
        *(keys, values, page_table, lengths, counts),
    )
    rows = out.reshape(-1, shape.width, shape.kv_heads * shape.group, shape.head_dim)
    return rows, *others[: int(rounds)], jax.freeze(keys), jax.freeze(values)


def plan_of(
    qkv: Float[Shapes, "filled width fused"],
    query_norm: Float[Shapes, " head_dim"],
    key_norm: Float[Shapes, " head_dim"],
    cos: Float[Shapes, "batch width half"],
    sin: Float[Shapes, "batch width half"],
    key_pages: Float[Shapes, "pages page_size kv_heads head_dim"],
    value_pages: Float[Shapes, "pages page_size kv_heads head_dim"],
    page_table: Int[Shapes, "batch max_pages"],
    lengths: Int[Shapes, " batch"],
    counts: Int[Shapes, " batch"],
    *,
    eps: float,
    causal: bool,
    window: int | None,
    window_of_block: bool = False,
    filled_batch: int | None = None,
    rounding: Rounding | None = None,
    sizes: BlockSizes | None = None,
    interpreted: bool = False,
) -> Plan:
    """The plan of this call; raises `NotForThisKernel` if the kernel cannot do it."""
    _, page_size, kv_heads, head_dim = key_pages.shape
    batch, width, dtypes = lengths.shape[0], qkv.shape[1], [str(qkv.dtype)]
    dtypes += [str(pages.dtype) for pages in (key_pages, value_pages)]
    require(len(set(dtypes)) == 1, f"qkv, keys and values in {', '.join(dtypes)}", "one dtype")
    require(head_dim == HEAD_DIM, f"head_dim {head_dim}", f"{HEAD_DIM}")
    group = qkv.shape[2] // head_dim // kv_heads - 2
    require(
        -(-width // EIGHT) * EIGHT * group <= TILE_ROWS,
        f"{width} tokens with {group} query heads per key-value head",
        f"at most {TILE_ROWS} rows, in eights of tokens",
    )
    shape = Shape(batch, kv_heads, width, group, head_dim, page_size, page_table.shape[1])
    chosen, rounds = sizes or choose_sizes(shape), rounding is not None
    require(
        not rounds or (rounding == "pieces" and can_round(shape, chosen)),
        f"a result to round to 8 bits, with {chosen.splits} splits",
        "scales of pieces, and two splits at most",
    )
    mask = Mask(causal, window, window_of_block)
    return make_plan(shape, chosen, qkv.dtype, mask, interpreted, rounds, eps)
