"""A matrix product split over its inputs, for kernels that add the parts up on their way.

Few tokens meet a large matrix faster when more thread blocks read it, each a run of the inputs.
XLA does so by itself, and adds the parts up in one more kernel.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.dispatch import Implementation, kernels_run

MOST_PARTS = 4
TOKENS_IN_PARTS = range(2, 129)
"""One token XLA multiplies in another way, which parts make slower; many need no parts."""
MULTIPROCESSORS = 132
"""Of an H100."""
LARGE_BLOCK, SMALL_BLOCK = 128, 64
"""Columns of the output that a thread block of XLA's matrix kernels computes, for many tokens and
for at most FEW_TOKENS."""
FEW_TOKENS = 32
SMALL_BLOCKS_AT_ONCE = 384
"""About three small blocks per multiprocessor."""


def split_product(
    x: Float[Array, "*tokens inputs"],
    matrix: Float[Array, "inputs outputs"],
    *,
    implementation: Implementation = "auto",
) -> Float[Array, "parts *tokens outputs"]:
    """`x @ matrix` as float32 parts that add up to it, or as one part in the dtype of `x`.

    One part if kernels do not run here, or if it would be no faster.
    """
    inputs, outputs = matrix.shape
    parts = parts_of(math.prod(x.shape[:-1]), inputs, outputs)
    if parts == 1 or not kernels_run(implementation):
        return (x @ matrix)[None]
    pieces = x.reshape(-1, parts, inputs // parts)
    matrices = matrix.reshape(parts, -1, outputs)
    product = jnp.einsum("tpi,pio->pto", pieces, matrices, preferred_element_type=jnp.float32)
    return product.reshape(parts, *x.shape[:-1], outputs)


def parts_of(tokens: int, inputs: int, outputs: int) -> int:
    """As many parts as give every multiprocessor a thread block of XLA's matrix kernels."""
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
