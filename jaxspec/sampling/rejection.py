"""Speculative rejection sampling: the target's tokens, drawn so that they agree with drawn drafts
as often as possible.

A draft was drawn from q, and the target's token has to be drawn from p:

    keep the draft        with probability min(1, p(draft) / q(draft))
    else draw another     from the positive part of p - q, in which the draft has no share

The result is distributed as p, and differs from the draft exactly if the draft was not kept. So the
rule of acceptance is the same as without draws: the longest prefix of drafts equal to the target's
tokens. For a draft that was not drawn, q is 1 at the draft, and the rule amounts to drawing from p.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.sampling.tokens import SlotSampling, filtered, greedy, key_at, sample

DRAFT, KEEP, OTHER = 1, 2, 3
"""Purposes of the two draws at the same position, each of which has its own key."""


def draw_drafts(
    logits: Float[Array, "batch drafts vocab"],
    sampling: SlotSampling,
    positions: Int[Array, "batch drafts"],
) -> Int[Array, "batch drafts"]:
    """A draft for each of `positions`; the likeliest token for requests without a temperature."""

    def draw(
        logits: Float[Array, " vocab"], sampling: SlotSampling, position: Int[Array, ""]
    ) -> Int[Array, ""]:
        key = key_at(sampling.seed, position, DRAFT)
        return jax.random.categorical(key, filtered(logits, sampling)).astype(jnp.int32)

    drawn = jax.vmap(jax.vmap(draw, in_axes=(0, None, 0)))(logits, sampling, positions)
    return jnp.where(sampling.temperature[:, None] > 0, drawn, greedy(logits))


def rejection_sample(
    logits: Float[Array, "batch width vocab"],
    drafts: Int[Array, "batch drafts"],
    num_drafts: Int[Array, " batch"],
    draft_logits: Float[Array, "batch drafts vocab"],
    sampling: SlotSampling,
    positions: Int[Array, "batch width"],
) -> Int[Array, "batch width"]:
    """The target's token at each of `positions`, for drafts drawn from `draft_logits`."""
    independent = sample(logits, sampling, positions)
    count = drafts.shape[1]
    with_drafts, sound = jax.vmap(jax.vmap(_keep_or_redraw, in_axes=(0, 0, 0, None, 0)))(
        logits[:, :count], drafts, draft_logits, sampling, positions[:, :count]
    )
    drafted = jnp.arange(count) < num_drafts[:, None]
    drawn = drafted & sound & (sampling.temperature[:, None] > 0)
    tokens = jnp.where(drawn, with_drafts, independent[:, :count])
    return independent.at[:, :count].set(tokens)


def _keep_or_redraw(
    logits: Float[Array, " vocab"],
    draft: Int[Array, ""],
    draft_logits: Float[Array, " vocab"],
    sampling: SlotSampling,
    position: Int[Array, ""],
) -> tuple[Int[Array, ""], Bool[Array, ""]]:
    """The token, and whether the draft's distribution is one: if the drafter's logits are not
    finite, its draft is no draw, and the token is drawn independently of it."""
    p = jax.nn.softmax(filtered(logits, sampling))
    q = jax.nn.softmax(filtered(draft_logits, sampling))
    kept = jax.random.uniform(key_at(sampling.seed, position, KEEP)) * q[draft] < p[draft]
    rest = jnp.log(jnp.maximum(p - q, 0.0))
    other = jax.random.categorical(key_at(sampling.seed, position, OTHER), rest)
    return jnp.where(kept, draft, other.astype(jnp.int32)), jnp.isfinite(q[draft])
