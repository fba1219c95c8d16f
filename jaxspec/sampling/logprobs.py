"""Log probabilities of the emitted tokens and of the likeliest alternatives."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

GROUP = 64
"""Size of a group of neighbouring token ids. The first of two searches compares the maxima of such
groups."""
PIECE = 64
"""Most tokens whose logits exist at the same time when those of many tokens are needed."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TopLogprobs:
    """Log probabilities under the model's own distribution, before temperature and filters."""

    chosen: Float[Array, "batch width"]
    """Log probabilities of the emitted tokens, or of the prompt's."""
    values: Float[Array, "batch width top"]
    """Log probabilities of the likeliest tokens, in falling order."""
    tokens: Int[Array, "batch width top"]
    """Ids of the likeliest tokens."""


def top_logprobs(
    logits: Float[Array, "batch width vocab"], chosen: Int[Array, "batch width"], count: int
) -> TopLogprobs:
    """Log probabilities of the chosen tokens and of the `count` likeliest ones."""
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    values, tokens = likeliest(logprobs, min(count, logits.shape[-1]))
    own = jnp.take_along_axis(logprobs, chosen[..., None], axis=-1)[..., 0]
    return TopLogprobs(own, values, tokens)


def top_logprobs_in_pieces(
    head: Callable[[Float[Array, "batch width hidden"]], Float[Array, "batch width vocab"]],
    hidden: Float[Array, "batch width hidden"],
    chosen: Int[Array, "batch width"],
    count: int,
) -> TopLogprobs:
    """The same from hidden states, with the head applied to a few tokens at a time: the logits of
    all tokens of a long prompt would need gigabytes."""
    tokens = chosen.size
    piece = min(tokens, PIECE)
    padding = -tokens % piece

    def split(x: Array) -> Array:
        flat = x.reshape(tokens, *x.shape[2:])
        padded = jnp.pad(flat, [(0, padding)] + [(0, 0)] * (flat.ndim - 1))
        return padded.reshape(-1, 1, piece, *flat.shape[1:])

    def joined(x: Array) -> Array:
        flat = x.reshape(-1, *x.shape[3:])[:tokens]
        return flat.reshape(*chosen.shape, *flat.shape[1:])

    found = jax.lax.map(
        lambda one: top_logprobs(head(one[0]), one[1], count), (split(hidden), split(chosen))
    )
    return jax.tree.map(joined, found)


def probabilities(
    logits: Float[Array, "batch width vocab"], chosen: Int[Array, "batch width"]
) -> Float[Array, "batch width"]:
    """The probability of one token at each place, in float32."""
    exact = logits.astype(jnp.float32)
    own = jnp.take_along_axis(exact, chosen[..., None], axis=-1)[..., 0]
    return jnp.exp(own - jax.nn.logsumexp(exact, axis=-1))


def likeliest(
    values: Float[Array, "batch width vocab"], count: int
) -> tuple[Float[Array, "batch width top"], Int[Array, "batch width top"]]:
    """The same as `jax.lax.top_k`, which sorts the whole vocabulary, by two small searches: the
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
