"""Runs a stack of decoder layers."""

from collections.abc import Sequence

import jax
from jaxtyping import Array, Float

from jaxspec.cache.cache import Cache
from jaxspec.cache.keys_values import KeysValues
from jaxspec.layers.chained import run_chained
from jaxspec.layers.decoder import DecoderLayer
from jaxspec.layers.linear import RMSNorm
from jaxspec.layers.paged import Paged
from pallas_kernels.dispatch import kernels_run

Hidden = Float[Array, "batch width hidden"]


def run_layers(
    layers: Sequence[DecoderLayer], norm: RMSNorm, x: Hidden, paged: Paged, cache: Cache[KeysValues]
) -> tuple[Hidden, list[Hidden], Cache[KeysValues]]:
    """Normed hidden states, the residual stream after each layer, and the cache with the block.

    If kernels run, neighbouring layers are run from attention to attention, which gives the same
    numbers except for rounding. With convolutions, or if layers are cut into shards, more happens
    between one attention and the next than those kernels know of.
    """
    alone = layers[0].convolutions is None and layers[0].geometry.shards.count == 1
    if alone and kernels_run(paged.implementation):
        return run_chained(layers, norm, x, paged, cache)
    after, written = [], []
    for i, (layer, pages) in enumerate(zip(layers, cache.layers, strict=True)):
        with jax.named_scope(f"layer_{i}"):
            x, pages = layer(x, paged, pages)
        after.append(x)
        written.append(pages)
    return norm(x), after, Cache(tuple(written))
