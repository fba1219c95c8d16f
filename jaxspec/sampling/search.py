"""The least logit that filters keep, by a binary search over all 32-bit numbers.

Each device counts the logits above a number in its part of the vocabulary, or adds up their
weights, and the devices sum what they found. Each such sum halves the range that is left, so the
search takes 32 sums for top_k and 32 for top_p, of one number per row each. It finds what sorting
the vocabulary would find.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, UInt32

from jaxspec.layers.shards import Shards
from jaxspec.sampling.parameters import SlotSampling

Numbers = UInt32[Array, "batch width"]
"""Floats as integers that have the same order."""


def searched_least(
    scaled: Float[Array, "batch width vocab"], sampling: SlotSampling, shards: Shards
) -> Float[Array, "batch width"]:
    """The least logit that is kept in each row."""
    size = scaled.shape[-1] * shards.count
    largest = shards.largest(scaled.max(axis=-1))
    weights = lambda: jnp.exp(scaled - largest[..., None])
    above = lambda number: _as_numbers(scaled) > number[..., None]
    count_above = lambda number: shards.summed(above(number).sum(axis=-1, dtype=jnp.float32))
    mass_above = lambda number: shards.summed(jnp.where(above(number), weights(), 0.0).sum(axis=-1))

    top_k = jnp.where(sampling.top_k == 0, size, jnp.minimum(sampling.top_k, size))
    by_count = _first_number(lambda number: count_above(number) < top_k, largest)
    # Of several tokens that are as likely as the last one of top_k, only as many count as fit.
    tied = (top_k - count_above(by_count)) * jnp.exp(_as_float(by_count) - largest)
    total = mass_above(by_count) + tied
    free = sampling.top_p >= 1
    by_mass = _first_number(
        lambda number: free | (mass_above(number) / total < sampling.top_p), largest
    )
    of_order = _as_float(jnp.maximum(by_count, by_mass))
    return jnp.maximum(of_order, largest + jnp.log(sampling.min_p))


def _first_number(
    keeps: Callable[[Numbers], Bool[Array, "batch width"]], largest: Float[Array, "batch width"]
) -> Numbers:
    """The least number that `keeps` keeps, if it keeps all larger ones. The largest of a row is
    always kept."""
    always = _as_numbers(largest)

    def halved(step: jax.Array, below: Numbers) -> Numbers:
        middle = below | (jnp.uint32(1) << (31 - step).astype(jnp.uint32))
        return jnp.where(keeps(middle) | (middle >= always), below, middle)

    return jax.lax.fori_loop(0, 32, halved, jnp.zeros_like(always)) + 1


SIGN = np.uint32(1 << 31)


def _as_numbers(x: Float[Array, "*tokens"]) -> UInt32[Array, "*tokens"]:
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >= SIGN, ~bits, bits | SIGN)


def _as_float(numbers: Numbers) -> Float[Array, "batch width"]:
    bits = jnp.where(numbers >= SIGN, numbers ^ SIGN, ~numbers)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
