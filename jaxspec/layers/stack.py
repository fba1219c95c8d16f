"""Runs a stack of decoder layers."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxtyping import Array, Float

from jaxspec.cache.cache import Cache
from jaxspec.cache.keys_values import KeysValues
from jaxspec.layers.chained import run_chained
from jaxspec.layers.decoder import DecoderLayer
from jaxspec.layers.exchanged import exchanges, run_exchanged
from jaxspec.layers.gated_delta import DeltaSizes
from jaxspec.layers.hybrid import HybridLayer
from jaxspec.layers.kernels import chain_adds_up, chain_shape, hybrid_chain_shape
from jaxspec.layers.linear import RMSNorm
from jaxspec.layers.paged import Paged
from jaxspec.layers.sums import CONVOLVED
from pallas_kernels.dense_chain import ChainShape
from pallas_kernels.dispatch import Implementation, kernels_meant

Hidden = Float[Array, "batch width hidden"]
Layer = Callable[[Hidden, Any, Any], tuple[Hidden, Any]]
"""Called with the residual stream, a way to read the layer's memory, and that memory."""


def run_layers(
    layers: Sequence[DecoderLayer], norm: RMSNorm, x: Hidden, paged: Paged, cache: Cache[KeysValues]
) -> tuple[Hidden, list[Hidden], Cache[KeysValues]]:
    """Normed hidden states, the residual stream after each layer, and the cache with the block.

    If kernels run, the layers are run from mixer to mixer, which gives the same numbers except for
    rounding. Layers with convolutions are not, because they do more between one attention and the
    next than those kernels can do; nor are sharded layers, unless kernels add up their products.
    """
    ways, implementation = [paged] * len(layers), paged.implementation
    geometry, unlike = layers[0].geometry, None if layers[0].convolutions is None else CONVOLVED
    if exchanges(geometry, x, cache, unlike):
        shape = chain_shape(geometry, *x.shape[:2])
        return run_over_inboxes(layers, norm, x, ways, cache, shape, implementation)
    if unlike is None and geometry.shards.count == 1 and kernels_meant(implementation):
        shape = chain_shape(geometry, *x.shape[:2])
        return run_chained(layers, norm, x, ways, cache, shape, implementation)
    return run_one_by_one(layers, norm, x, ways, cache)


def run_hybrid_layers(
    layers: Sequence[HybridLayer],
    norm: RMSNorm,
    x: Hidden,
    ways: Sequence[Any],
    cache: Cache[Any],
    sizes: DeltaSizes,
    implementation: Implementation,
) -> tuple[Hidden, list[Hidden], Cache[Any]]:
    """The same for hybrid layers. `ways` has, for each layer, how its mixer reads its memory;
    `sizes` are those of the recurrent mixers."""
    geometry = layers[0].geometry
    shape = hybrid_chain_shape(geometry, sizes, *x.shape[:2])
    if exchanges(geometry, x, cache):
        return run_over_inboxes(layers, norm, x, ways, cache, shape, implementation)
    if shape is not None and geometry.shards.count == 1 and kernels_meant(implementation):
        return run_chained(layers, norm, x, ways, cache, shape, implementation)
    return run_one_by_one(layers, norm, x, ways, cache)


def run_over_inboxes(
    layers: Sequence[DecoderLayer] | Sequence[HybridLayer],
    norm: RMSNorm,
    x: Hidden,
    ways: Sequence[Any],
    cache: Cache[Any],
    shape: ChainShape | None,
    implementation: Implementation,
) -> tuple[Hidden, list[Hidden], Cache[Any]]:
    """Sharded layers whose products are added up by way of inboxes: from mixer to mixer if a kernel
    can do that, with calls of this shape, or else after each product."""
    geometry, width = layers[0].geometry, x.shape[1]
    if shape is not None and chain_adds_up(geometry, shape, width, x.dtype, implementation):
        return run_chained(layers, norm, x, ways, cache, shape, implementation, cache.inboxes)
    return run_exchanged(layers, norm, x, ways, cache, implementation)


def run_one_by_one(
    layers: Sequence[Layer], norm: RMSNorm, x: Hidden, attends: Sequence[Any], cache: Cache[Any]
) -> tuple[Hidden, list[Hidden], Cache[Any]]:
    """The same for layers of any kind. `attends` has, for each layer, how it reads its memory."""
    after, written = [], []
    for i, (layer, attend, memory) in enumerate(zip(layers, attends, cache.layers, strict=True)):
        with jax.named_scope(f"layer_{i}"):
            x, memory = layer(x, attend, memory)
        after.append(x)
        written.append(memory)
    return norm(x), after, cache.with_layers(written)
