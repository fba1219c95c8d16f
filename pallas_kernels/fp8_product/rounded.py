"""Rows that are rounded to 8 bits, as one argument, and how XLA rounds them."""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.fp8_product.quantise import BLOCK, quantised_pieces
from pallas_kernels.fp8_product.row_tiles import TilesOfRoundedRows

Rounding = Literal["pieces", "rows"]
"""What has a scale of its own: each piece of 128 inputs of a row, or each whole row. The first is
for matrices with scales of blocks, the second for those with scales of outputs."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoundedRows:
    """Activations that are rounded to e4m3, as `fp8_product` takes them."""

    numbers: Float[Array, "*tokens inputs"]
    """In e4m3."""
    scales: Float[Array, "row_tiles pieces size"]
    """In float32, in the order in which the product's thread blocks read them: by tile of rows
    (`RowTiles`), and within a tile by piece. The padding of a tile means nothing."""
    dtype: Any = dataclasses.field(metadata={"static": True})
    """The dtype of the rows before they were rounded, and of products with them."""


def pieces_of(inputs: int, rounding: Rounding) -> int:
    """How many scales a row has."""
    return inputs // BLOCK if rounding == "pieces" else 1


def rounded_rows(x: Float[Array, "*tokens inputs"], rounding: Rounding) -> RoundedRows:
    """Rounds rows to e4m3 with XLA."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    tokens, inputs = rows.shape
    pieces = pieces_of(inputs, rounding)
    in_pieces = rows.reshape(tokens, pieces, inputs // pieces)
    numbers, scales = quantised_pieces(in_pieces, whole_rows=rounding == "rows")
    return RoundedRows(numbers.reshape(x.shape), in_tiles(scales), x.dtype)


def in_tiles(scales: Float[Array, "tokens pieces"]) -> Float[Array, "row_tiles pieces size"]:
    """The scales of all rows in the order in which thread blocks read them."""
    tokens, pieces = scales.shape
    tiles = TilesOfRoundedRows(tokens)
    filled = jnp.pad(scales, ((0, tiles.padded - tokens), (0, 0)))
    by_tile = filled.reshape(tiles.count, tiles.rows, pieces).transpose(0, 2, 1)
    return jnp.pad(by_tile, ((0, 0), (0, 0), (0, tiles.scales_at_once - tiles.rows)))


def scales_by_row(rounded: RoundedRows) -> Float[Array, "tokens pieces"]:
    """The scales of all rows, in their order."""
    tiles = TilesOfRoundedRows(math.prod(rounded.numbers.shape[:-1]))
    by_tile = rounded.scales[:, :, : tiles.rows].transpose(0, 2, 1)
    return by_tile.reshape(tiles.padded, rounded.scales.shape[1])[: tiles.tokens]
