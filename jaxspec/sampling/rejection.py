"""Speculative rejection sampling: tokens of the target that agree with drawn drafts as often as
they can.

A draft was drawn from q, the target's token is to be drawn from p:

    keep the draft        with probability min(1, p / q) of it
    else draw another     from the positive part of p - q, where the draft itself has no share

What comes out is drawn from p, and differs from the draft exactly when the draft was not kept. So
acceptance stays what it is without draws: the longest prefix of drafts equal to the target's
tokens. For a draft that was not drawn (q is certain of it) the rule comes down to drawing from p.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.sampling.tokens import SlotSampling, filtered, greedy, key_at, sample

DRAFT, KEEP, OTHER = 1, 2, 3
"""Purposes of draws at the same position; each has its own key."""


def draw_drafts(
    logits: Float[Array, "slots drafts vocab"],
    rows: SlotSampling,
    positions: Int[Array, "slots drafts"],
) -> Int[Array, "slots drafts"]:
    """A draft for each of `positions`; the likeliest token for rows without a temperature."""

    def draw(
        logits: Float[Array, " vocab"], row: SlotSampling, position: Int[Array, ""]
    ) -> Int[Array, ""]:
        key = key_at(row.seed, position, DRAFT)
        return jax.random.categorical(key, filtered(logits, row)).astype(jnp.int32)

    drawn = jax.vmap(jax.vmap(draw, in_axes=(0, None, 0)))(logits, rows, positions)
    return jnp.where(rows.temperature[:, None] > 0, drawn, greedy(logits))


def sample_beside_drafts(
    logits: Float[Array, "slots width vocab"],
    drafts: Int[Array, "slots drafts"],
    num_drafts: Int[Array, " slots"],
    draft_logits: Float[Array, "slots drafts vocab"],
    rows: SlotSampling,
    positions: Int[Array, "slots width"],
) -> Int[Array, "slots width"]:
    """The target's token at each of `positions`, for drafts drawn from `draft_logits`."""
    alone = sample(logits, rows, positions)
    count = drafts.shape[1]
    beside = jax.vmap(jax.vmap(_beside, in_axes=(0, 0, 0, None, 0)))(
        logits[:, :count], drafts, draft_logits, rows, positions[:, :count]
    )
    drafted = jnp.arange(count) < num_drafts[:, None]
    drawn = drafted & (rows.temperature[:, None] > 0)
    return alone.at[:, :count].set(jnp.where(drawn, beside, alone[:, :count]))


def _beside(
    logits: Float[Array, " vocab"],
    draft: Int[Array, ""],
    draft_logits: Float[Array, " vocab"],
    row: SlotSampling,
    position: Int[Array, ""],
) -> Int[Array, ""]:
    p = jax.nn.softmax(filtered(logits, row))
    q = jax.nn.softmax(filtered(draft_logits, row))
    kept = jax.random.uniform(key_at(row.seed, position, KEEP)) * q[draft] < p[draft]
    rest = jnp.log(jnp.maximum(p - q, 0.0))
    other = jax.random.categorical(key_at(row.seed, position, OTHER), rest)
    return jnp.where(kept, draft, other.astype(jnp.int32))
