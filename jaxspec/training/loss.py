"""Weighted cross entropy over the drafts of blocks."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.training.recipe import Recipe


def decay_weights(drafts: int, decay: float) -> Float[Array, " {drafts}"]:
    """Weights that fall with the place of the draft: exp(-(k - 1) / decay) for k = 1, 2, ..."""
    return jnp.exp(-jnp.arange(drafts) / decay)


def dpace_weights(
    probabilities: Float[Array, "*blocks drafts"], floor: float
) -> Float[Array, "*blocks drafts"]:
    """Weights that reflect how much the expected acceptance length depends on each draft.

    The smoothed chance that drafts 1..j are all accepted is the product of (1 - floor) p_i + floor;
    draft k is part of every such prefix with j >= k.
    """
    smoothed = (1 - floor) * probabilities + floor
    reached = jnp.cumprod(smoothed, axis=-1)
    return jnp.flip(jnp.cumsum(jnp.flip(reached, axis=-1), axis=-1), axis=-1)


def block_loss(
    recipe: Recipe,
    block_size: int,
    cross_entropy: Float[Array, "batch blocks drafts"],
    probabilities: Float[Array, "batch blocks drafts"],
    known: Bool[Array, "batch blocks drafts"],
) -> Float[Array, ""]:
    """Mean loss over blocks. Drafts whose label is not in the drafter's vocabulary do not count."""
    if recipe.weighting == "dpace":
        weights = dpace_weights(jax.lax.stop_gradient(probabilities), recipe.dpace_floor)
        return jnp.sum(weights * known * cross_entropy) / (known.shape[0] * known.shape[1])
    weights = decay_weights(block_size - 1, recipe.decay_for(block_size)) * known
    return jnp.sum(weights * cross_entropy) / jnp.maximum(jnp.sum(weights), 1e-6)


def hard_cross_entropy(
    logits: Float[Array, "*tokens vocab"], labels: Int[Array, "*tokens"]
) -> Float[Array, "*tokens"]:
    """Cross entropy with one label per token."""
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def soft_cross_entropy(
    logits: Float[Array, "*tokens vocab"], target_logits: Float[Array, "*tokens vocab"]
) -> Float[Array, "*tokens"]:
    """Cross entropy with the target's distribution."""
    weights = jax.nn.softmax(target_logits, axis=-1)
    return -jnp.sum(weights * jax.nn.log_softmax(logits, axis=-1), axis=-1)


def acceptance_lengths(correct: Bool[Array, "*blocks drafts"]) -> Float[Array, "*blocks"]:
    """Drafts before the first wrong one, plus the token that the target adds."""
    return 1.0 + jnp.sum(jnp.cumprod(correct.astype(jnp.float32), axis=-1), axis=-1)
