"""What is lost at each draft of a block, and its weighted mean over the drafts."""

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
    lost: Float[Array, "batch blocks drafts"],
    probabilities: Float[Array, "batch blocks drafts"],
    counts: Bool[Array, "batch blocks drafts"],
) -> Float[Array, ""]:
    """Mean over blocks of what is lost at their drafts, as far as a draft counts. `probabilities`
    are those of the labels."""
    if recipe.weighting == "dpace":
        weights = dpace_weights(jax.lax.stop_gradient(probabilities), recipe.dpace_floor)
        return jnp.sum(weights * counts * lost) / (counts.shape[0] * counts.shape[1])
    weights = decay_weights(block_size - 1, recipe.decay_for(block_size)) * counts
    return jnp.sum(weights * lost) / jnp.maximum(jnp.sum(weights), 1e-6)


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


def distance(
    logits: Float[Array, "*tokens draft_vocab"], wanted: Float[Array, "*tokens draft_vocab"]
) -> Float[Array, "*tokens"]:
    """Sum of the differences between a drafter's distribution and the target's, of which `wanted`
    is the part over the drafter's tokens. A drawn draft is rejected with half of it."""
    differences = jnp.abs(jax.nn.softmax(logits, axis=-1) - wanted)
    never_drafted = jnp.maximum(1.0 - jnp.sum(wanted, axis=-1), 0.0)
    return jnp.sum(differences, axis=-1) + never_drafted


def binary_cross_entropy(
    logits: Float[Array, "*tokens"], wanted: Float[Array, "*tokens"]
) -> Float[Array, "*tokens"]:
    """Cross entropy of a yes or no with the chance of yes."""
    return jax.nn.softplus(logits) - wanted * logits


def acceptance_lengths(correct: Bool[Array, "*blocks drafts"]) -> Float[Array, "*blocks"]:
    """Drafts before the first wrong one, plus the token that the target adds."""
    return 1.0 + jnp.sum(jnp.cumprod(correct.astype(jnp.float32), axis=-1), axis=-1)
