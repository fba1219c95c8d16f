"""Rounding rows to 8 bits in kernels: functions for the kernels of other ops, and one kernel that
only rounds, for which XLA would launch three.

    scale   = largest magnitude / 448, never 0        of each piece of 128 inputs, or of each row
    numbers = row / scale, in e4m3

A thread block (one warpgroup) rounds one piece of eight rows, or one row if it has one scale.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.fp8_product.quantise import (
    BLOCK,
    E4M3,
    rounded,
    scales_of_pieces,
    scales_of_rows,
)
from pallas_kernels.fp8_product.rounded import Rounding, pieces_of
from pallas_kernels.fp8_product.row_tiles import EIGHT, RowTiles, TilesOfRoundedRows
from pallas_kernels.jax_internals import pl, plgpu, store
from pallas_kernels.tiles import load, named, rows_in_lanes, strided

PIECES = rows_in_lanes(BLOCK)


def padded(tiles: RowTiles, rows: Float[Array, "tokens inputs"]) -> Float[Array, "filled inputs"]:
    return jnp.pad(rows, ((0, tiles.padded - tiles.tokens), (0, 0)))


def round_rows(
    rows: Float[Array, "tokens inputs"],
    rounding: Rounding,
    interpret: plgpu.InterpretGPUParams | None,
) -> tuple[Float[Array, "filled inputs"], Float[Array, "row_tiles pieces size"]]:
    """Rows in e4m3, with padding, and their scales."""
    tiles, inputs = TilesOfRoundedRows(len(rows)), rows.shape[1]
    if rounding == "pieces":
        body, grid = round_eight, {"eight": tiles.padded // EIGHT, "piece": inputs // BLOCK}
    else:
        body, grid = round_one, {"row": tiles.padded}
    return plgpu.kernel(
        named("round_rows", functools.partial(body, tiles)),
        out_type=(
            jax.ShapeDtypeStruct((tiles.padded, inputs), E4M3),
            type_of_scales(len(rows), inputs, rounding),
        ),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=1,
        thread_name="warpgroup",
        interpret=interpret,
    )(padded(tiles, rows))


def type_of_scales(tokens: int, inputs: int, rounding: Rounding) -> jax.ShapeDtypeStruct:
    """Shape and dtype of the scales of all tiles."""
    tiles = TilesOfRoundedRows(tokens)
    shape = tiles.count, pieces_of(inputs, rounding), tiles.scales_at_once
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def round_eight(tiles: RowTiles, x, numbers, scales) -> None:
    """Rounds one piece of eight rows."""
    rows, inputs = eight_rows(), piece_of_inputs()
    wide = load(x.at[rows, inputs], PIECES).astype(jnp.float32)
    write_eight(tiles, wide, numbers, scales)


def eight_rows():
    return pl.ds(lax.axis_index("eight") * EIGHT, EIGHT)


def piece_of_inputs(first: Any = 0):
    """The inputs of this thread block's piece; pieces are counted from the input `first` on."""
    return pl.ds(first + lax.axis_index("piece") * BLOCK, BLOCK)


def write_eight(tiles: RowTiles, wide, numbers, scales) -> None:
    """Writes one piece of eight rows in 8 bits. The padding of a tile's scales is neither written
    nor read."""
    first = lax.axis_index("eight") * EIGHT
    in_8_bits, of_rows = eight_in_8_bits(wide)
    store(numbers.at[eight_rows(), piece_of_inputs()], in_8_bits)
    of_piece = scales.at[lax.div(first, tiles.rows), lax.axis_index("piece")]
    store(of_piece.at[pl.ds(lax.rem(first, tiles.rows), EIGHT)], of_rows)


def eight_in_8_bits(wide) -> tuple[Any, Any]:
    """One piece of eight or more rows in 8 bits, and its scale in each row."""
    of_rows = scales_of_pieces(abs(wide).max(axis=1))
    return rounded(wide / lax.broadcast_in_dim(of_rows, wide.shape, [0])), of_rows


def round_one(tiles: RowTiles, x, numbers, scales) -> None:
    """Rounds one row, all of which is in registers."""
    row = lax.axis_index("row")
    whole = load(x.at[row], strided(x.shape[1], x.dtype))
    write_one(tiles, row, [whole], [numbers.at[row]], scales)


def write_one(tiles: RowTiles, row, shares: list, numbers: list, scales) -> None:
    """Writes one row in 8 bits: its `shares`, which are in registers, to their places `numbers`."""
    magnitudes = [abs(share.astype(jnp.float32)) for share in shares]
    scale = scales_of_rows(functools.reduce(jnp.maximum, magnitudes).max())
    for share, place in zip(shares, numbers, strict=True):
        store(place, rounded(share.astype(jnp.float32) / scale))
    scales[lax.div(row, tiles.rows), 0, lax.rem(row, tiles.rows)] = scale
