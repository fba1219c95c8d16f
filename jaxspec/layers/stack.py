"""Decoder layers one after the other, each called from attention to attention."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxspec.cache.block import Block
from jaxspec.cache.cache import Cache
from jaxspec.cache.keys_values import empty_pages
from jaxspec.layers.decoder import Decoder, DecoderLayer, Following, Rotation
from jaxspec.layers.linear import RMSNorm
from pallas_kernels.dense_chain import first_meetings


def run_layers(
    layers: Sequence[DecoderLayer],
    norm: RMSNorm,
    x: Float[Array, "batch width hidden"],
    rotation: Rotation,
    block: Block,
    cache: Cache,
) -> tuple[Float[Array, "batch width hidden"], list[Float[Array, "batch width hidden"]], Cache]:
    """Normed hidden states, the residual stream after each layer, and the cache with the block.

    The one kernel from attention to attention takes rows in eights: whole slots that are nobody's
    fill them up on its way, where that makes 64 at most, and attention leaves those alone. What is
    in them means nothing, and no row looks at another.
    """
    slots, width = x.shape[:2]
    enough = slots_in_eights(slots, width)
    if enough > slots and layers[0].chains(enough * width):
        x = jnp.pad(x, ((0, enough - slots), (0, 0), (0, 0)))
    caches, after = list(cache.layers), []
    meetings = first_meetings()
    following = [*(layer.entrance for layer in layers), Following(norm, None)]
    with jax.named_scope("layer_0"), jax.named_scope("qkv"):
        qkv = following[0].qkv.in_parts(following[0].norm(x), layers[0].implementation)
    for i, layer in enumerate(layers):
        with jax.named_scope(f"layer_{i}"):
            attended, caches[i] = layer.attention(qkv, rotation, block, caches[i])
            x, qkv, meetings = layer.to_next(x, attended, following[i + 1], meetings)
        after.append(x[:slots])
    return qkv[0][:slots], after, Cache(tuple(caches))


def pages_for(decoder: Decoder, num_pages: int, page_size: int, dtype: DTypeLike) -> Cache:
    """Empty pages for every layer of a decoder."""
    heads = decoder.num_kv_heads, decoder.head_dim
    layers = range(decoder.num_layers)
    return Cache(tuple(empty_pages(num_pages, page_size, *heads, dtype) for _ in layers))


def slots_in_eights(slots: int, width: int) -> int:
    """The least number of slots, no fewer, whose rows are a multiple of 8."""
    step = 8 // math.gcd(width, 8)
    return -(-slots // step) * step
