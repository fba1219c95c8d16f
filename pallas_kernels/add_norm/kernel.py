"""The kernel bodies of `add_norm`: one thread block, which is one warpgroup, per row (token).

The row of `x`, its addend and the norm's scale are each read once, with coalesced loads, and stay
in registers. Only the sum of squares, and a scale of the whole row, are reductions over all warps.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.fp8_product.quantise import BLOCK, rounded, scales_of_pieces
from pallas_kernels.fp8_product.rounded import Rounding
from pallas_kernels.fp8_product.rounding import write_one
from pallas_kernels.fp8_product.row_tiles import RowTiles
from pallas_kernels.jax_internals import plgpu, store
from pallas_kernels.tiles import load, strided

NUMBERS_OF_LANE = 4
"""Numbers that a lane rounds: each warp rounds one piece of BLOCK numbers."""
PIECES_AT_ONCE = 4
"""Pieces that are rounded at a time, one by each of the four warps."""
AT_ONCE = PIECES_AT_ONCE * BLOCK
PIECES = plgpu.Layout.TILED(
    plgpu.Tiling(((PIECES_AT_ONCE, BLOCK), (NUMBERS_OF_LANE,))),
    warp_dims=(-3,),
    lane_dims=(-2,),
    vector_dim=-1,
)


def one_row(eps: float, x, addend, scale, total, normed) -> None:
    normed.at[lax.axis_index("row")][...] = norm_of_sum(eps, x, addend, scale, total)


def one_row_in_8_bits(
    tiles: RowTiles,
    rounding: Rounding,
    eps: float,
    x,
    addend,
    scale,
    total,
    numbers,
    scales,
    **scratch,
) -> None:
    """Rounds the norm, which has the same bits as without rounding, to 8 bits.

    If each piece has a scale, the norm changes its layout by way of shared memory: it was computed
    in the layout of coalesced loads, in which a warp need not have exactly one piece. `numbers` is
    then [tokens, pieces, BLOCK]."""
    row = lax.axis_index("row")
    normed = norm_of_sum(eps, x, addend, scale, total)
    if rounding == "rows":
        return write_one(tiles, row, [normed], [numbers.at[row]], scales)
    whole = scratch["whole"]
    whole[...] = normed.reshape(whole.shape)
    plgpu.commit_smem()
    wide = load(whole, PIECES).astype(jnp.float32)
    of_pieces = scales_of_pieces(abs(wide).max(axis=1))
    in_8_bits = rounded(wide / lax.broadcast_in_dim(of_pieces, wide.shape, [0]))
    store(numbers.at[row], in_8_bits)
    store(scales.at[lax.div(row, tiles.rows), :, lax.rem(row, tiles.rows)], of_pieces)


def norm_of_sum(eps: float, x, addend, scale, total) -> Any:
    """Writes the sum of this thread block's row, and returns its norm."""
    row, layout = lax.axis_index("row"), strided(x.shape[1], x.dtype)
    parts = [
        load(addend.at[part, row], layout).astype(jnp.float32) for part in range(addend.shape[0])
    ]
    product = sum(parts[1:], parts[0])
    return norm_after_adding(eps, x.at[row], product, scale, total.at[row])


def add_and_norm(eps: float, x, product, scale, total, normed) -> None:
    """Adds a product in float32 to one row, and norms it."""
    normed[...] = norm_after_adding(eps, x, product, scale, total)


def norm_after_adding(eps: float, x, product, scale, total) -> Any:
    """Writes the sum of one row and a product in float32, and returns its norm."""
    hidden = x.shape[0]
    layout = strided(hidden, x.dtype)
    scales = load(scale, layout).astype(jnp.float32)
    product = product.astype(x.dtype).astype(jnp.float32)
    added = (load(x, layout).astype(jnp.float32) + product).astype(x.dtype)
    total[...] = added
    wide = added.astype(jnp.float32)
    inverse = lax.rsqrt((wide * wide).sum() * (1.0 / hidden) + eps)
    return (wide * inverse * scales).astype(x.dtype)
