"""Decoder layers one after the other, each called from attention to attention."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.cache.block import Block
from jaxspec.cache.pool import KVPool
from jaxspec.layers.decoder import DecoderLayer, Following, Rotation
from jaxspec.layers.linear import RMSNorm
from pallas_kernels.dense_chain import first_meetings


def run_layers(
    layers: Sequence[DecoderLayer],
    norm: RMSNorm,
    x: Float[Array, "slots width hidden"],
    rotation: Rotation,
    block: Block,
    pool: KVPool,
) -> tuple[Float[Array, "slots width hidden"], list[Float[Array, "slots width hidden"]], KVPool]:
    """Normed hidden states, the residual stream after each layer, and the pool with the block.

    The one kernel from attention to attention takes rows in eights: whole slots that are nobody's
    fill them up on its way, where that makes 64 at most, and attention leaves those alone. What is
    in them means nothing, and no row looks at another.
    """
    slots, width = x.shape[:2]
    enough = slots_in_eights(slots, width)
    if enough > slots and layers[0].chains(enough * width):
        x = jnp.pad(x, ((0, enough - slots), (0, 0), (0, 0)))
    keys, values, after = list(pool.keys), list(pool.values), []
    meetings = first_meetings()
    following = [*(layer.entrance for layer in layers), Following(norm, None)]
    with jax.named_scope("layer_0"), jax.named_scope("qkv"):
        qkv = following[0].qkv.in_parts(following[0].norm(x), layers[0].implementation)
    for i, layer in enumerate(layers):
        with jax.named_scope(f"layer_{i}"):
            attended, keys[i], values[i] = layer.attention(qkv, rotation, block, keys[i], values[i])
            x, qkv, meetings = layer.to_next(x, attended, following[i + 1], meetings)
        after.append(x[:slots])
    return qkv[0][:slots], after, KVPool(keys=tuple(keys), values=tuple(values))


def slots_in_eights(slots: int, width: int) -> int:
    """The least number of slots, no fewer, whose rows are a multiple of 8."""
    step = 8 // math.gcd(width, 8)
    return -(-slots // step) * step
