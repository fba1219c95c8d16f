"""Log probabilities of the emitted tokens, with the likeliest others beside them."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

MAX_LOGPROBS = 20
GROUP = 64
"""Neighbouring ids that are looked at as one first."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TopLogprobs:
    """Of every row, under the model's own distribution (before temperature and filters)."""

    chosen: Float[Array, "slots width"]
    """Of the token that was emitted."""
    values: Float[Array, "slots width top"]
    """Of the likeliest tokens, in falling order."""
    tokens: Int[Array, "slots width top"]
    """Ids of the likeliest tokens."""


def top_logprobs(
    logits: Float[Array, "slots width vocab"], chosen: Int[Array, "slots width"]
) -> TopLogprobs:
    """Of the chosen tokens and of the likeliest ones."""
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    values, tokens = likeliest(logprobs, min(MAX_LOGPROBS, logits.shape[-1]))
    own = jnp.take_along_axis(logprobs, chosen[..., None], axis=-1)[..., 0]
    return TopLogprobs(own, values, tokens)


def likeliest(
    values: Float[Array, "slots width vocab"], count: int
) -> tuple[Float[Array, "slots width top"], Int[Array, "slots width top"]]:
    """`jax.lax.top_k`, which sorts the vocabulary, in two small ones: the largest `count` values
    are in the `count` groups with the largest maxima. Of equal values the first comes first."""
    padding = -values.shape[-1] % GROUP
    padded = jnp.pad(values, ((0, 0), (0, 0), (0, padding)), constant_values=-jnp.inf)
    groups = padded.reshape(*values.shape[:2], -1, GROUP)
    _, chosen = jax.lax.top_k(groups.max(axis=-1), min(count, groups.shape[2]))
    chosen = jnp.sort(chosen, axis=-1)
    candidates = jnp.take_along_axis(groups, chosen[..., None], axis=2)
    found, at = jax.lax.top_k(candidates.reshape(*values.shape[:2], -1), count)
    tokens = jnp.take_along_axis(chosen, at // GROUP, axis=-1) * GROUP + at % GROUP
    return found, tokens.astype(jnp.int32)
