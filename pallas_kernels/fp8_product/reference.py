"""`fp8_product` in plain JAX: the specification."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.fp8_product.rounded import RoundedRows, rounded_rows, scales_by_row

TOKENS_AT_ONCE = 128
"""Tokens that are computed at a time if rows have more than one piece, because the products of all
pieces are an array [pieces, tokens, outputs], which must fit into memory."""


def fp8_product(
    x: Float[Array, "*tokens inputs"] | RoundedRows,
    weight: Float[Array, "outputs inputs"],
    scales: Float[Array, "scaled_outputs pieces"],
    *,
    quantise_inputs: bool = False,
) -> Float[Array, "parts *tokens outputs"]:
    if quantise_inputs and not isinstance(x, RoundedRows):
        x = rounded_rows(x, "rows" if len(scales) == len(weight) else "pieces")
    is_rounded = isinstance(x, RoundedRows)
    numbers, row_scales = (x.numbers, scales_by_row(x)) if is_rounded else (x, None)
    rows = numbers.reshape(-1, weight.shape[1])
    product = functools.partial(_product, weight, scales, x.dtype)
    if scales.shape[1] > 1 and len(rows) > TOKENS_AT_ONCE:
        by_row = lambda row: product(*jax.tree.map(lambda one: one[None], row))[0]
        found = jax.lax.map(by_row, (rows, row_scales), batch_size=TOKENS_AT_ONCE)
    else:
        found = product(rows, row_scales)
    return found.reshape(1, *numbers.shape[:-1], len(weight))


def bytes_of_products(tokens: int, outputs: int, pieces: int) -> int:
    """Bytes of the products of all pieces, which XLA writes and then writes again in another order
    of the axes."""
    at_once = tokens if pieces == 1 else min(tokens, TOKENS_AT_ONCE)
    return 2 * 4 * pieces * at_once * outputs


def _product(
    weight: Float[Array, "outputs inputs"],
    scales: Float[Array, "scaled_outputs pieces"],
    dtype: DTypeLike,
    rows: Float[Array, "tokens inputs"],
    row_scales: Float[Array, "tokens pieces"] | None,
) -> Float[Array, "tokens outputs"]:
    (outputs, inputs), (scaled_outputs, pieces) = weight.shape, scales.shape
    in_pieces = lambda matrix: matrix.reshape(len(matrix), pieces, inputs // pieces).astype(dtype)
    # Every e4m3 is a bfloat16 too, so nothing is rounded here.
    products = jnp.einsum(
        "mpk,npk->pmn", in_pieces(rows), in_pieces(weight), preferred_element_type=jnp.float32
    )
    if row_scales is not None:
        products = products * row_scales.T[:, :, None]
    by_scale = products.reshape(pieces, len(rows), scaled_outputs, outputs // scaled_outputs)
    scaled = by_scale * scales.T[:, None, :, None]
    return scaled.sum(axis=0).reshape(len(rows), outputs).astype(dtype)
