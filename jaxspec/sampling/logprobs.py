"""Log probabilities of the emitted tokens, with the likeliest others beside them."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

MAX_LOGPROBS = 20


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
    values, tokens = jax.lax.top_k(logprobs, min(MAX_LOGPROBS, logits.shape[-1]))
    own = jnp.take_along_axis(logprobs, chosen[..., None], axis=-1)[..., 0]
    return TopLogprobs(own, values, tokens.astype(jnp.int32))
