"""The largest logits of a row, and the sum of all exponentials, which make up a softmax.

Each of several devices has a part of the vocabulary. They exchange a few numbers per row: their
largest logits with the tokens, or a maximum and a sum.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.layers.shards import Shards

GROUP = 64
"""Size of a group of neighbouring token ids. The first of two searches compares the maxima of such
groups."""


def likeliest_of_all(
    logits: Float[Array, "batch width vocab"], count: int, shards: Shards
) -> tuple[Float[Array, "batch width top"], Int[Array, "batch width top"]]:
    """The `count` largest logits of the vocabulary, of which every device has a part, in falling
    order, and their tokens. A small vocabulary gives fewer. Of equal logits, the one of the token
    with the lower id comes first."""
    size = logits.shape[-1]
    values, tokens = likeliest(logits, min(count, size))
    if shards.count == 1:
        return values, tokens
    received = shards.exchanged(values, tokens + shards.first(size))
    # Devices and each device's tokens are in the order of tokens, which `top_k` keeps.
    beside = [jnp.concatenate([*part], axis=-1) for part in received]
    values, at = jax.lax.top_k(beside[0], min(count, beside[0].shape[-1]))
    return values, jnp.take_along_axis(beside[1], at, axis=-1)


def masses(
    logits: Float[Array, "batch width vocab"], shards: Shards
) -> tuple[Float[Array, "batch width"], Float[Array, "batch width"]]:
    """The largest logit of the vocabulary, of which every device has a part, and the sum of all
    exponentials divided by the exponential of the largest logit."""
    largest = logits.max(axis=-1)
    # A part may be minus infinity everywhere; subtracting minus infinity would give NaN.
    subtracted = jnp.where(largest == -jnp.inf, 0.0, largest)
    mass = jnp.exp(logits - subtracted[..., None]).sum(axis=-1)
    if shards.count == 1:
        return largest, mass
    of_each = shards.exchanged(largest[..., None], mass[..., None])
    all_largest, all_masses = (part[..., 0] for part in of_each)
    of_all = all_largest.max(axis=0)
    shares = all_masses * jnp.exp(all_largest - of_all)
    return of_all, sum(shares[i] for i in range(1, shards.count)) + shares[0]


def likeliest(
    values: Float[Array, "batch width vocab"], count: int
) -> tuple[Float[Array, "batch width top"], Int[Array, "batch width top"]]:
    """The same as `jax.lax.top_k`, which sorts the whole vocabulary, but by two small searches: the
    `count` largest values are in the `count` groups with the largest maxima. Equal values keep
    their order."""
    padding = -values.shape[-1] % GROUP
    padded = jnp.pad(values, ((0, 0), (0, 0), (0, padding)), constant_values=-jnp.inf)
    groups = padded.reshape(*values.shape[:2], -1, GROUP)
    _, chosen = jax.lax.top_k(groups.max(axis=-1), min(count, groups.shape[2]))
    chosen = jnp.sort(chosen, axis=-1)
    candidates = jnp.take_along_axis(groups, chosen[..., None], axis=2)
    top, at = jax.lax.top_k(candidates.reshape(*values.shape[:2], -1), count)
    tokens = jnp.take_along_axis(chosen, at // GROUP, axis=-1) * GROUP + at % GROUP
    return top, tokens.astype(jnp.int32)
