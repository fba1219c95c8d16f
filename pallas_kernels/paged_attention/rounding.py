"""Rounding the result to 8 bits while it is written, for the product that reads it.

A piece of 128 inputs shares a scale, and a head of 128 numbers is such a piece: one row of a tile.
So whoever has whole rows can round them. If two splits share a request, each therefore finishes
half of the rows, not half of the columns (`splits.py`):

    rows     0-7   8-15   16-23   24-31  ...     registers of a thread: two rows, eight apart
    split     0     1       0       1    ...
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels import jax_internals as internals
from pallas_kernels.fp8_product.quantise import BLOCK
from pallas_kernels.fp8_product.rounding import eight_in_8_bits
from pallas_kernels.fp8_product.row_tiles import TilesOfRoundedRows
from pallas_kernels.jax_internals import inline_mgpu, pl, plgpu, ptx
from pallas_kernels.paged_attention.blocks import TILE_ROWS

EIGHT = 8
TILE_LAYOUT = plgpu.Layout.WGMMA
HALF_ROWS = TILE_ROWS // 2
HALF_LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling(((HALF_ROWS, 8), (8, 8), (2,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)
"""TILE_LAYOUT with only one of a thread's two rows."""


def half_of(value, half: int, interpreted: bool):
    """One half of the rows of an array [TILE_ROWS, ...] in TILE_LAYOUT."""
    shape = HALF_ROWS, *value.shape[1:]
    if interpreted:
        by_eight = value.reshape(-1, 2, EIGHT, *value.shape[1:])
        return by_eight[:, half].reshape(shape)
    layouts = TILE_LAYOUT, HALF_LAYOUT
    before, after = layouts if value.ndim == 2 else [layout.reduce(1) for layout in layouts]
    in_row = 2 if value.ndim == 2 else 1

    @inline_mgpu(
        arg_types=(before,),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.float32), layout=after),
    )
    def chosen(_, value):
        floats = internals.floats_of(value)
        own = [number for i, number in enumerate(floats) if i // in_row % 2 == half]
        return internals.array_of(own, shape, after)[0]

    return chosen(value)


def own_half_of(value, split, interpreted: bool):
    """The half of the rows that a split finishes."""
    halves = [half_of(value, half, interpreted) for half in range(2)]
    return jnp.where(lax.broadcast(split == 0, halves[0].shape), *halves)


def place_of_scale(tiles: TilesOfRoundedRows, heads: int, token, head):
    """Index of a scale among those of all tiles, heads and places in a tile (`RoundedRows`)."""
    rows = jnp.int32(tiles.rows)
    of_tile = lax.div(token, rows) * heads + head
    return of_tile * tiles.scales_at_once + lax.rem(token, rows)


def in_8_bits(attended, dtype) -> tuple[Any, Any]:
    """Rows rounded to 16 bits, as without rounding, and then to 8; and the scale of each."""
    wide = attended.astype(dtype).astype(jnp.float32)
    assert wide.shape[1] == BLOCK, "a row is one piece"
    return eight_in_8_bits(wide)


def scatter(target, places, values, layout, interpreted: bool) -> None:
    """Writes float32 numbers [rows] to their places in memory; a negative place means nowhere."""
    if interpreted:
        for i in range(values.shape[0]):
            write_one(target, places[i], values[i])
        return

    @inline_mgpu(arg_types=(plgpu.RefType(), layout, layout))
    def write_each(_, target, places, values) -> None:
        of_thread = internals.floats_of(places), internals.floats_of(values)
        for place, value in zip(*of_thread, strict=True):
            address = internals.address_of_float(target, place)
            ptx(STORE_UNLESS_NEGATIVE, address, place, value)

    write_each(target, places, values)


def write_one(target, place, value) -> None:
    _, heads, at_once = target.shape
    of_tile, number = lax.div(place, at_once), lax.rem(place, at_once)

    @pl.when(place >= 0)
    def _():
        target[lax.div(of_tile, heads), lax.rem(of_tile, heads), number] = value


STORE_UNLESS_NEGATIVE = """{
    .reg .pred somewhere;
    setp.ge.s32 somewhere, $1, 0;
    @somewhere st.global.f32 [$0], $2;
}"""
