"""The drafter's own probabilities of its drafts, and how well they predict which are accepted.

A score is the probability that the drafter gives a draft. It says which drafts of a step are better
than the request's usual ones, but not how likely they are accepted. So scores are sorted into bins.
Each bin counts how many of its drafts were accepted, and how many were expected to be without the
scores. The difference says how much likelier than expected drafts in this bin are:

    bin             0 .. 0.1   ..   0.97 .. 1
    tried              40      ..       300
    kept                3      ..       292
    expected           22      ..       240      from the requests' outcomes alone
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.acceptance.outcomes import log_odds, rate

EDGES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
"""Where one bin ends and the next begins."""
MEMORY = 0.98
"""Weight of a step relative to the next one. What a score means depends on the drafter and the kind
of text, and changes slowly."""
TRIES_OF_ALL = 16.0
"""How many tries the rate over all bins counts for when it is mixed into a bin's rate."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scores:
    """The scores of the drafts that are being verified, and what became of earlier ones."""

    of_slots: Float[Array, "slots drafts"]
    """The score of each draft of each slot's request; 0 for a draft without one."""
    tried: Float[Array, " bins"]
    """Drafts with a score in this bin that were verified after all before them were accepted."""
    kept: Float[Array, " bins"]
    """How many of these were accepted."""
    expected: Float[Array, " bins"]
    """How many of these were expected to be accepted, by the outcomes of earlier steps."""


def no_scores(slots: int, drafts: int) -> Scores:
    """The scores of an engine that has drafted nothing yet."""
    bins = lambda: jnp.zeros(len(EDGES) + 1, jnp.float32)
    return Scores(jnp.zeros((slots, drafts), jnp.float32), bins(), bins(), bins())


def with_drafts(
    scores: Scores, slots: Int[Array, " batch"], own: Float[Array, "batch drafts"] | None
) -> Scores:
    """The record with the scores `own` of this step's drafts; None if the drafts have no scores."""
    if own is None:
        return dataclasses.replace(scores, of_slots=scores.of_slots.at[slots].set(0.0))
    of_slots = scores.of_slots.at[slots].set(0.0).at[slots, : own.shape[1]].set(own)
    return dataclasses.replace(scores, of_slots=of_slots)


def without_drafts(scores: Scores, replaced: Bool[Array, ""]) -> Scores:
    """Forgets the scores of this step if any of its drafts were replaced."""
    return dataclasses.replace(scores, of_slots=jnp.where(replaced, 0.0, scores.of_slots))


def with_scores(
    scores: Scores, own: Float[Array, "batch drafts"], chances: Float[Array, "batch drafts"]
) -> Float[Array, "batch drafts"]:
    """The chances by outcomes alone, raised or lowered by what scores like these have meant."""
    overall = rate(scores.expected.sum(), scores.tried.sum(), 0.5, TRIES_OF_ALL)
    odds = [
        log_odds(jnp, rate(count, scores.tried, overall, TRIES_OF_ALL))
        for count in (scores.kept, scores.expected)
    ]
    likelier = jnp.where(_in_bins(own), odds[0] - odds[1], 0.0).sum(axis=-1)
    return jax.nn.sigmoid(log_odds(jnp, chances) + likelier)


def after_verified(
    scores: Scores,
    own: Float[Array, "batch drafts"],
    chances: Float[Array, "batch drafts"],
    num_drafts: Int[Array, " batch"],
    accepted: Int[Array, " batch"],
) -> Scores:
    """The record after a step whose drafts had these scores, and these chances by outcomes."""
    place = jnp.arange(own.shape[1])
    kept = place < accepted[:, None]
    tried = (place <= accepted[:, None]) & (place < num_drafts[:, None])
    in_bins = _in_bins(own)

    def added(before: Float[Array, " bins"], counts: Float[Array, "batch drafts"]) -> Array:
        return MEMORY * before + jnp.where(in_bins, counts[..., None], 0.0).sum(axis=(0, 1))

    return dataclasses.replace(
        scores,
        tried=added(scores.tried, tried.astype(jnp.float32)),
        kept=added(scores.kept, (kept & tried).astype(jnp.float32)),
        expected=added(scores.expected, jnp.where(tried, chances, 0.0)),
    )


def _in_bins(own: Float[Array, "batch drafts"]) -> Bool[Array, "batch drafts bins"]:
    """Which bin each draft is in; none if it has no score."""
    edges = jnp.array((0.0, *EDGES, 2.0), jnp.float32)
    return (own[..., None] > edges[:-1]) & (own[..., None] <= edges[1:])
