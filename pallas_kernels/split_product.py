"""A matrix product split over its inputs (split-K) whose parts the next kernel adds up.

With few tokens the product is faster if more thread blocks read the matrix, each for a part of the
inputs. XLA splits such products too, but adds the parts up in one more kernel.
"""

import math

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.dispatch import Implementation, kernels_meant

MOST_PARTS = 4
TOKENS_IN_PARTS = range(2, 129)
"""XLA multiplies a single token in another way, which parts would make slower. More than 128 tokens
fill the GPU without parts."""
MULTIPROCESSORS = 132
"""Of an H100."""
LARGE_BLOCK, SMALL_BLOCK = 128, 64
"""Columns of the output that one thread block of XLA's matrix kernels computes: SMALL_BLOCK with at
most FEW_TOKENS tokens, LARGE_BLOCK with more."""
FEW_TOKENS = 32
SMALL_BLOCKS_AT_ONCE = 384
"""Small blocks that run at the same time, about three per multiprocessor."""


def split_product(
    x: Float[Array, "*tokens inputs"],
    matrix: Float[Array, "inputs outputs"],
    *,
    implementation: Implementation = "auto",
) -> Float[Array, "parts *tokens outputs"]:
    """`x @ matrix` as float32 parts that are still to be added up, or as one part in the dtype of
    `x`. `add_norm` and `qkv_write` take such parts.

    There is one part if the kernels do not run here or if more would not be faster.
    """
    inputs, outputs = matrix.shape
    parts = parts_of(math.prod(x.shape[:-1]), inputs, outputs)
    if parts == 1 or kernels_meant(implementation) is None:
        return (x @ matrix)[None]
    pieces = x.reshape(-1, parts, inputs // parts)
    matrices = matrix.reshape(parts, -1, outputs)
    product = jnp.einsum("tpi,pio->pto", pieces, matrices, preferred_element_type=jnp.float32)
    return product.reshape(parts, *x.shape[:-1], outputs)


def total_of(
    parts: Float[Array, "parts *tokens outputs"], dtype: DTypeLike
) -> Float[Array, "*tokens outputs"]:
    """The whole product: the sum of its parts in `dtype`, or a single part as it is."""
    return parts[0] if len(parts) == 1 else parts.sum(axis=0).astype(dtype)


def parts_of(tokens: int, inputs: int, outputs: int) -> int:
    """The most parts (1, 2 or 4) whose thread blocks in XLA's kernels all run at the same time.

    Each part must have a multiple of 128 inputs.
    """
    if tokens not in TOKENS_IN_PARTS:
        return 1
    block, blocks_at_once = LARGE_BLOCK, MULTIPROCESSORS
    if tokens <= FEW_TOKENS:
        block, blocks_at_once = SMALL_BLOCK, SMALL_BLOCKS_AT_ONCE
    blocks = -(-outputs // block)
    parts = MOST_PARTS
    while parts > 1 and (blocks * parts > blocks_at_once or inputs % (parts * 128)):
        parts //= 2
    return parts
