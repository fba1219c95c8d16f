"""A sharded stack of decoder layers whose sums over the devices are computed by `exchange_norm`.

Both sums of a layer are followed by a residual sum and a norm, which are the same on all devices:

    x --------------------------+------------------------------+-- x of the next layer
    normed -- mixer, own part --^ norm -- gate, up, own part --^ next layer's norm
"""

from collections.abc import Sequence
from typing import Any, cast

import jax
from jaxtyping import Array, Float

from jaxspec.cache.cache import Cache
from jaxspec.layers.decoder import Decoder, DecoderLayer, Mixer
from jaxspec.layers.hybrid import HybridLayer
from jaxspec.layers.linear import RMSNorm
from jaxspec.layers.sums import choice_of_sums
from pallas_kernels.dispatch import Implementation
from pallas_kernels.exchange import Inboxes

Hidden = Float[Array, "batch width hidden"]
Parts = Float[Array, "parts batch width hidden"]


def exchanges(geometry: Decoder, x: Hidden, cache: Cache[Any], unlike: str | None = None) -> bool:
    """Whether `run_exchanged` runs these layers: if there are inboxes, which an engine makes, and
    `choice_of_sums` says so. Otherwise XLA computes the sums. `unlike` is as there."""
    if geometry.shards.count == 1 or cache.inboxes is None:
        return False
    num_tokens = x.shape[0] * x.shape[1]
    return choice_of_sums(geometry, x.dtype, num_tokens, unlike).implementation != "psum"


def run_exchanged(
    layers: Sequence[DecoderLayer] | Sequence[HybridLayer],
    norm: RMSNorm,
    x: Hidden,
    ways: Sequence[Any],
    cache: Cache[Any],
    implementation: Implementation,
) -> tuple[Hidden, list[Hidden], Cache[Any]]:
    """The same results as `run_one_by_one`, except for the order and the rounding of sums. Each
    product but that with gate and up is left in parts, if that is faster."""
    mixers: Sequence[Mixer] = [layer.mixer for layer in layers]
    exchange = Exchanging(cache, layers[0].geometry)
    normed, after, written = mixers[0].norm(x), [], []
    for i, next_norm in enumerate([*(mixer.norm for mixer in mixers[1:]), norm]):
        with jax.named_scope(f"layer_{i}"):
            parts, memory = mixed(mixers[i], normed, ways[i], cache.layers[i], implementation)
            x, normed = exchange(layers[i].mlp.norm, x, parts)
            with jax.named_scope("gate_up"):
                gated = layers[i].mlp.gated(normed)
            with jax.named_scope("down"):
                parts = layers[i].mlp.down.in_parts(gated, implementation)
            x, normed = exchange(next_norm, x, parts)
        after.append(x)
        written.append(memory)
    return normed, after, Cache(tuple(written), exchange.inboxes)


def mixed(
    mixer: Mixer, normed: Hidden, way: Any, memory: Any, implementation: Implementation
) -> tuple[Parts, Any]:
    """This device's product with a mixer's last matrix, and the layer's new cache."""
    first, last = mixer.scopes
    with jax.named_scope(first):
        projected = mixer.projection.in_parts(normed, implementation)
    found, memory = mixer.mix_parts(projected, way, memory)
    with jax.named_scope(last):
        return mixer.out.in_parts(found, implementation), memory


class Exchanging:
    """The exchanges of one stack, one after the other."""

    def __init__(self, cache: Cache[Any], geometry: Decoder):
        assert cache.inboxes is not None, "nothing to exchange by"
        self.inboxes: Inboxes = cache.inboxes
        self.implementation: Implementation = cast(Implementation, geometry.shards.exchange)

    def __call__(self, norm: RMSNorm, x: Hidden, parts: Parts) -> tuple[Hidden, Hidden]:
        with jax.named_scope("exchange"):
            x, normed, self.inboxes = norm.after_exchanging(
                x, parts, self.inboxes, self.implementation
            )
        return x, normed
