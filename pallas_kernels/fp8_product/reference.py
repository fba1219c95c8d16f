"""`fp8_product` in plain JAX: the specification."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.fp8_product.quantise import quantised_pieces

TOKENS_AT_ONCE = 128
"""The products of all pieces are arrays of [pieces, tokens, outputs]; more tokens than these are
computed one group after the other, so that they fit into memory."""


def fp8_product(
    x: Float[Array, "*tokens inputs"],
    weight: Float[Array, "outputs inputs"],
    scales: Float[Array, "scaled_outputs pieces"],
    *,
    quantise_inputs: bool = False,
) -> Float[Array, "parts *tokens outputs"]:
    rows = x.reshape(-1, x.shape[-1])
    product = functools.partial(_product, weight, scales, quantise_inputs)
    if scales.shape[1] > 1 and len(rows) > TOKENS_AT_ONCE:
        by_row = lambda row: product(row[None])[0]
        found = jax.lax.map(by_row, rows, batch_size=TOKENS_AT_ONCE)
    else:
        found = product(rows)
    return found.reshape(1, *x.shape[:-1], len(weight))


def bytes_of_products(tokens: int, outputs: int, pieces: int) -> int:
    """What XLA writes in between, and once more while it changes the order of the axes."""
    at_once = tokens if pieces == 1 else min(tokens, TOKENS_AT_ONCE)
    return 2 * 4 * pieces * at_once * outputs


def _product(
    weight: Float[Array, "outputs inputs"],
    scales: Float[Array, "scaled_outputs pieces"],
    quantise_inputs: bool,
    rows: Float[Array, "tokens inputs"],
) -> Float[Array, "tokens outputs"]:
    (outputs, inputs), (scaled_outputs, pieces) = weight.shape, scales.shape
    in_pieces = lambda matrix: matrix.reshape(len(matrix), pieces, inputs // pieces)
    numbers, row_scales = in_pieces(rows), None
    if quantise_inputs:
        whole_rows = scaled_outputs == outputs
        numbers, row_scales = quantised_pieces(numbers, whole_rows)
    # Every e4m3 is a bfloat16 too, so nothing is rounded here.
    products = jnp.einsum(
        "mpk,npk->pmn",
        numbers.astype(rows.dtype),
        in_pieces(weight).astype(rows.dtype),
        preferred_element_type=jnp.float32,
    )
    if row_scales is not None:
        products = products * row_scales.T[:, :, None]
    by_scale = products.reshape(pieces, len(rows), scaled_outputs, outputs // scaled_outputs)
    scaled = by_scale * scales.T[:, None, :, None]
    return scaled.sum(axis=0).reshape(len(rows), outputs).astype(rows.dtype)
