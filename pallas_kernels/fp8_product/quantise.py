"""Numbers as 8-bit floats (e4m3) with scales beside them, in numpy and in jax alike."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

E4M3 = jnp.dtype(jnp.float8_e4m3fn)
LARGEST = 448.0
"""The largest number of e4m3."""
BLOCK = 128
"""A block of a matrix that shares a scale has this many outputs and inputs, and a piece of a row
this many inputs."""
SMALLEST_MAGNITUDE = 1e-10
"""The largest magnitude of a piece counts as at least this, so that no scale is zero."""
SMALLEST_ROW_SCALE = 1 / (LARGEST * 512)
"""The smallest scale of a whole row, for the same reason."""

Numbers = Float[np.ndarray | Array, "..."]


def rounded(numbers: Numbers) -> Numbers:
    """Rounds to the nearest e4m3, ties to even. Larger numbers become the largest e4m3."""
    return numbers.clip(-LARGEST, LARGEST).astype(E4M3)


def quantised_blocks(
    matrix: Float[np.ndarray | Array, "outputs inputs"],
) -> tuple[
    Float[np.ndarray | Array, "outputs inputs"],
    Float[np.ndarray | Array, "scaled_outputs pieces"],
]:
    """A matrix [outputs, inputs] in e4m3, and a float32 scale for each block of 128 x 128, chosen
    so that the block's largest number becomes the largest of e4m3."""
    outputs, inputs = matrix.shape
    blocks = matrix.reshape(outputs // BLOCK, BLOCK, inputs // BLOCK, BLOCK).astype(jnp.float32)
    largest = abs(blocks).max(axis=(1, 3), keepdims=True)
    scales = largest.clip(SMALLEST_MAGNITUDE) / np.float32(LARGEST)
    return rounded(blocks / scales).reshape(outputs, inputs), scales[:, 0, :, 0]


def quantised_pieces(
    rows: Float[Array, "tokens pieces per_piece"], whole_rows: bool
) -> tuple[Float[Array, "tokens pieces per_piece"], Float[Array, "tokens pieces"]]:
    """Rows in e4m3, and a float32 scale for each piece of a row. Pieces of 128 inputs and whole
    rows have different smallest scales."""
    wide = rows.astype(jnp.float32)
    largest = abs(wide).max(axis=-1, keepdims=True)
    scales = scales_of_rows(largest) if whole_rows else scales_of_pieces(largest)
    numbers: Any = rounded(wide / scales)
    return numbers, scales[..., 0]


def scales_of_pieces(largest: Float[Array, "..."]) -> Float[Array, "..."]:
    """The scales of pieces of 128 inputs with these largest magnitudes."""
    return largest.clip(SMALLEST_MAGNITUDE) / LARGEST


def scales_of_rows(largest: Float[Array, "..."]) -> Float[Array, "..."]:
    """The scales of whole rows with these largest magnitudes."""
    return (largest / LARGEST).clip(SMALLEST_ROW_SCALE)
