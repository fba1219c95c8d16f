"""`qkv_write` on Mosaic GPU: one thread block per token and eight heads of its fused row.

    fused row    | query heads ...... | key heads | value heads |      head_dim numbers each
    tiles        |  8  |  8  |  8  |  8  |     8     |     8     |

A tile may hold heads of several kinds. Its rows are normed and rotated in registers, then each
run of heads that stays together goes to its place by one bulk copy.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.tiles import require

HEADS_PER_TILE = 8
LANES_PER_HEAD = 16


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def qkv_write(
    qkv: Float[Array, "slots width fused"],
    query_norm: Float[Array, " head_dim"] | None,
    key_norm: Float[Array, " head_dim"],
    cos: Float[Array, "slots width half"],
    sin: Float[Array, "slots width half"],
    pool_rows: Int[Array, "slots width"],
    key_pages: Float[Array, "pages page_size kv_heads head_dim"],
    value_pages: Float[Array, "pages page_size kv_heads head_dim"],
    *,
    eps: float,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[
    Float[Array, "slots kv_heads width group head_dim"],
    Float[Array, "pages page_size kv_heads head_dim"],
    Float[Array, "pages page_size kv_heads head_dim"],
]:
    slots, width, fused = qkv.shape
    _, page_size, kv_heads, head_dim = key_pages.shape
    all_heads = fused // head_dim
    heads = all_heads - 2 * kv_heads
    group = heads // kv_heads
    require(qkv.dtype == key_pages.dtype == value_pages.dtype, "qkv and pages of one dtype")
    require(head_dim % (2 * LANES_PER_HEAD) == 0, "head_dim a multiple of 32")
    require(all_heads >= HEADS_PER_TILE, "at least 8 heads in a fused row")

    half = head_dim // 2
    layout = head_rows(half)
    query_run = math.gcd(group, HEADS_PER_TILE)
    pool_run = math.gcd(heads, kv_heads, HEADS_PER_TILE)

    def kernel(qkv_gmem, qn_gmem, kn_gmem, cos_gmem, sin_gmem, rows_gmem, k_gmem, v_gmem, *rest):
        *q_gmem, out = rest
        slot, token = lax.axis_index("slot"), lax.axis_index("token")
        start = lax.axis_index("tile") * HEADS_PER_TILE
        # The last tile may be moved back; the heads it repeats are not written twice.
        base = jnp.minimum(start, all_heads - HEADS_PER_TILE)
        heads_here = pl.ds(base, HEADS_PER_TILE)

        def halves(ref, row_layout):
            load = lambda at: plgpu.load(ref.at[at], layout=row_layout, optimized=False)
            return load((..., pl.ds(0, half))), load((..., pl.ds(half, half)))

        x1, x2 = halves(qkv_gmem.at[slot, token, heads_here], layout)
        x1, x2 = x1.astype(jnp.float32), x2.astype(jnp.float32)
        per_column = layout.reduce(0)
        spread = lambda x: lax.broadcast_in_dim(x, x1.shape, [1])
        angle = lambda ref: spread(
            plgpu.load(ref.at[slot, token], layout=per_column, optimized=False)
        )
        c, s = angle(cos_gmem), angle(sin_gmem)
        head = base + plgpu.broadcasted_iota(jnp.int32, x1.shape, 0, layout=layout)
        query_scale = halves(qn_gmem, per_column)
        key_scale = halves(kn_gmem, per_column)
        scale1, scale2 = (
            jnp.where(head < heads, spread(q.astype(jnp.float32)), spread(k.astype(jnp.float32)))
            for q, k in zip(query_scale, key_scale)
        )
        mean = (x1 * x1 + x2 * x2).sum(axis=1) * (1.0 / head_dim)
        inverse = lax.broadcast_in_dim(lax.rsqrt(mean + eps), x1.shape, [0])
        n1, n2 = x1 * inverse * scale1, x2 * inverse * scale2
        is_value = head >= heads + kv_heads
        out[:, pl.ds(0, half)] = jnp.where(is_value, x1, n1 * c - n2 * s).astype(qkv.dtype)
        out[:, pl.ds(half, half)] = jnp.where(is_value, x2, n2 * c + n1 * s).astype(qkv.dtype)
        plgpu.commit_smem()

        pool_row = rows_gmem[slot, token]
        page, offset = lax.div(pool_row, page_size), lax.rem(pool_row, page_size)

        def send(run, low, high, target):
            """Copies the heads of [low, high) that are in this tile, `run` at a time."""
            for j in range(0, HEADS_PER_TILE, run):
                first = base + j

                @pl.when((first >= start) & (first >= low) & (first < high))
                def _():
                    plgpu.copy_smem_to_gmem(out.at[pl.ds(j, run)], target(first - low))

        if group:
            send(
                query_run,
                0,
                heads,
                lambda h: q_gmem[0].at[
                    slot, lax.div(h, group), token, pl.ds(lax.rem(h, group), query_run)
                ],
            )
        for low, pool in ((heads, k_gmem), (heads + kv_heads, v_gmem)):
            send(
                pool_run,
                low,
                low + kv_heads,
                lambda h, pool=pool: pool.at[page, offset, pl.ds(h, pool_run)],
            )
        plgpu.wait_smem_to_gmem(0)

    kernel.__name__ = "qkv_write"
    keys, values = jax.new_ref(key_pages), jax.new_ref(value_pages)
    packed = jax.ShapeDtypeStruct((slots, kv_heads, width, group, head_dim), qkv.dtype)
    query = plgpu.kernel(
        kernel,
        out_type=(packed,) if group else (),
        grid=(slots, width, -(-all_heads // HEADS_PER_TILE)),
        grid_names=("slot", "token", "tile"),
        num_threads=1,
        thread_name="wg",
        scratch_types=(plgpu.SMEM((HEADS_PER_TILE, head_dim), qkv.dtype),),
        interpret=interpret,
    )(
        qkv.reshape(slots, width, all_heads, head_dim),
        key_norm if query_norm is None else query_norm,
        key_norm,
        cos,
        sin,
        pool_rows,
        keys,
        values,
    )
    query = query[0] if group else jnp.zeros(packed.shape, packed.dtype)
    return query, jax.freeze(keys), jax.freeze(values)


def head_rows(half: int) -> plgpu.Layout:
    """[8, half]: each head in 16 lanes, so that both halves of a rotation meet in one lane."""
    return plgpu.Layout.TILED(
        plgpu.Tiling(((HEADS_PER_TILE, half), (2, half), (half // LANES_PER_HEAD,))),
        warp_dims=(-5,),
        lane_dims=(-3, -2),
        vector_dim=-1,
    )
