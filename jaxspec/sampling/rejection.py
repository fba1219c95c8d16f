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
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxspec.layers.shards import WHOLE, Shards
from jaxspec.sampling.filters import filtered
from jaxspec.sampling.likeliest import masses
from jaxspec.sampling.parameters import SlotSampling
from jaxspec.sampling.tokens import INDEPENDENT, drawn, key_at

DRAFT, KEEP, OTHER = 1, 2, 3
"""Purposes of the draws at the same position, each of which has its own key."""


def draw_drafts(
    logits: Float[Array, "batch drafts vocab"],
    sampling: SlotSampling,
    positions: Int[Array, "batch drafts"],
    shards: Shards = WHOLE,
) -> Int[Array, "batch drafts"]:
    """A draft for each of `positions`; the likeliest token for requests without a temperature."""
    kept = filtered(logits, sampling.of_rows, shards)
    tokens = drawn(kept, sampling, positions, DRAFT, shards)
    return jnp.where(sampling.temperature[:, None] > 0, tokens, shards.likeliest(logits)[0])


def rejection_sample(
    logits: Float[Array, "batch width vocab"],
    drafts: Int[Array, "batch drafts"],
    num_drafts: Int[Array, " batch"],
    draft_logits: Float[Array, "batch drafts vocab"],
    sampling: SlotSampling,
    positions: Int[Array, "batch width"],
    likeliest: Int[Array, "batch width"],
    shards: Shards = WHOLE,
) -> Int[Array, "batch width"]:
    """The target's token at each of `positions`, for drafts drawn from `draft_logits`; for requests
    without a temperature it is the `likeliest`. Each of several devices has the same part of the
    vocabulary in both arrays of logits, and all make the same choices."""
    hot, count, width = sampling.temperature[:, None] > 0, drafts.shape[1], positions.shape[1]

    def draw() -> Int[Array, "batch width"]:
        # Target and drafter are filtered together, so that devices exchange once for both.
        both = jnp.concatenate([x.astype(jnp.float32) for x in (logits, draft_logits)], axis=1)
        kept = filtered(both, sampling.of_rows, shards)
        independent = drawn(kept[:, :width], sampling, positions, INDEPENDENT, shards)
        with_drafts, sound = _keep_or_redraw(
            kept[:, :count], drafts, kept[:, width:], sampling, positions[:, :count], shards
        )
        drafted = jnp.arange(count) < num_drafts[:, None]
        tokens = jnp.where(drafted & sound, with_drafts, independent[:, :count])
        return jnp.where(hot, independent.at[:, :count].set(tokens), likeliest)

    return jax.lax.cond(jnp.any(hot), draw, lambda: likeliest)


def _keep_or_redraw(
    logits: Float[Array, "batch drafts vocab"],
    drafts: Int[Array, "batch drafts"],
    draft_logits: Float[Array, "batch drafts vocab"],
    sampling: SlotSampling,
    positions: Int[Array, "batch drafts"],
    shards: Shards,
) -> tuple[Int[Array, "batch drafts"], Bool[Array, "batch drafts"]]:
    """The tokens, and whether each draft was drawn from a valid distribution. It was not if the
    drafter's logits are not finite; the caller then draws the token independently of the draft."""
    p, q = _softmax(logits, shards), _softmax(draft_logits, shards)
    of_p, of_q = shards.at(p, drafts), shards.at(q, drafts)
    kept = _uniform(sampling, positions) * of_q < of_p
    rest = jnp.log(jnp.maximum(p - q, 0.0))
    other = drawn(rest, sampling, positions, OTHER, shards)
    return jnp.where(kept, drafts, other), jnp.isfinite(of_q)


def _softmax(
    logits: Float[Array, "batch drafts vocab"], shards: Shards
) -> Float[Array, "batch drafts vocab"]:
    largest, mass = masses(logits, shards)
    return jnp.exp(logits - largest[..., None]) / mass[..., None]


def _uniform(
    sampling: SlotSampling, positions: Int[Array, "batch drafts"]
) -> Float[Array, "batch drafts"]:
    def number(seed: UInt32[Array, ""], position: Int[Array, ""]) -> Float[Array, ""]:
        return jax.random.uniform(key_at(seed, position, KEEP))

    return jax.vmap(jax.vmap(number, in_axes=(None, 0)))(sampling.seed, positions)
