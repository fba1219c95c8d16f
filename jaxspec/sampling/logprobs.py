"""Log probabilities of the emitted tokens and of the likeliest alternatives."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.layers.shards import WHOLE, Shards
from jaxspec.sampling.likeliest import likeliest_of_all, masses

PIECE = 64
"""The most tokens whose logits are in memory at once when the logits of many tokens are needed."""


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
    logits: Float[Array, "batch width vocab"],
    chosen: Int[Array, "batch width"],
    count: int,
    shards: Shards = WHOLE,
) -> TopLogprobs:
    """Log probabilities of the chosen tokens and of the `count` likeliest ones."""
    exact = shards.after(logits.astype(jnp.float32), chosen)
    largest, mass = masses(exact, shards)
    values, tokens = likeliest_of_all(exact, count, shards)
    logprob = lambda x, largest, mass: (x - largest) - jnp.log(mass)
    own = logprob(shards.at(exact, chosen), largest, mass)
    return TopLogprobs(own, logprob(values, largest[..., None], mass[..., None]), tokens)


def top_logprobs_in_pieces(
    head: Callable[[Float[Array, "batch width hidden"]], Float[Array, "batch width vocab"]],
    hidden: Float[Array, "batch width hidden"],
    chosen: Int[Array, "batch width"],
    count: int,
    shards: Shards = WHOLE,
) -> TopLogprobs:
    """The same from hidden states, with the head applied to a few tokens at a time, because the
    logits of all tokens of a long prompt would need gigabytes."""
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

    of_piece = lambda piece: top_logprobs(head(piece[0]), piece[1], count, shards)
    found = jax.lax.map(of_piece, (split(hidden), split(chosen)))
    return jax.tree.map(joined, found)


def probabilities(
    logits: Float[Array, "batch width vocab"],
    chosen: Int[Array, "batch width"],
    shards: Shards = WHOLE,
) -> Float[Array, "batch width"]:
    """The probability of one token at each place, in float32."""
    exact = shards.after(logits.astype(jnp.float32), chosen)
    largest, mass = masses(exact, shards)
    return jnp.exp(shards.at(exact, chosen) - largest) / mass
