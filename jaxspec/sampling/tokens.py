"""Sampling of every token of a step with its request's own parameters and its own key."""

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Float, Int, Key, UInt32

from jaxspec.layers.shards import WHOLE, Shards
from jaxspec.sampling.filters import filtered
from jaxspec.sampling.parameters import SlotSampling

INDEPENDENT = 0
"""Purpose of drawing a token of the target independently of any draft."""


def key_at(seed: UInt32[Array, ""], position: Int[Array, ""], purpose: int) -> Key[Array, ""]:
    """The key of one draw, which depends only on these arguments."""
    key = jax.random.key(seed, impl="threefry2x32")
    return jax.random.fold_in(jax.random.fold_in(key, position), purpose)


def sample(
    logits: Float[Array, "batch width vocab"],
    sampling: SlotSampling,
    positions: Int[Array, "batch width"],
    likeliest: Int[Array, "batch width"],
    shards: Shards = WHOLE,
) -> Int[Array, "batch width"]:
    """The token at each of `positions`: drawn for requests with a temperature, `likeliest` for the
    others. If no request has a temperature, the same program neither sorts nor draws."""
    hot = sampling.temperature[:, None] > 0

    def draw() -> Int[Array, "batch width"]:
        kept = filtered(logits, sampling.of_rows, shards)
        return jnp.where(hot, drawn(kept, sampling, positions, INDEPENDENT, shards), likeliest)

    return jax.lax.cond(jnp.any(hot), draw, lambda: likeliest)


def drawn(
    logits: Float[Array, "batch width vocab"],
    sampling: SlotSampling,
    positions: Int[Array, "batch width"],
    purpose: int,
    shards: Shards = WHOLE,
) -> Int[Array, "batch width"]:
    """A draw from the softmax of the logits at each position: the largest logit after noise was
    added. A token's noise depends on the key and the token, not on which device has the token."""
    tokens = shards.first(logits.shape[-1]) + jnp.arange(logits.shape[-1])

    def noise(seed: UInt32[Array, ""], position: Int[Array, ""]) -> Float[Array, " vocab"]:
        return gumbel_of(key_at(seed, position, purpose), tokens)

    of_requests = jax.vmap(jax.vmap(noise, in_axes=(None, 0)))(sampling.seed, positions)
    return shards.likeliest(logits + of_requests)[0]


def gumbel_of(key: Key[Array, ""], tokens: Int[Array, " vocab"]) -> Float[Array, " vocab"]:
    """The part for these tokens of what `jax.random.gumbel` gives for the whole vocabulary."""
    one, other = jax.random.key_data(key)
    counts = tokens.astype(jnp.uint32)
    high = counts >> 31  # of 64 bits; zeros, because no token has so large an id
    bits = jnp.bitwise_xor(*threefry2x32_p.bind(one, other, high, counts))
    mantissas = jax.lax.bitcast_convert_type((bits >> 9) | jnp.uint32(ONE), jnp.float32) - 1
    tiny = jnp.finfo(jnp.float32).tiny
    return -jnp.log(-jnp.log(jnp.maximum(mantissas * (1 - tiny) + tiny, tiny)))


ONE = 0x3F800000
"""The bits of 1.0, whose mantissa is replaced by random bits to get a number from 1 to 2."""
