"""How well drafts predict their labels, and what is lost at each: one function per kind of drafter.

A kind's loss is a weighted sum of terms, each a mean over the drafts of blocks:

    dflash, eagle3    cross entropy of the logits
    dspark            cross entropy, distance from the target's distribution, error of confidence
    dflash2           cross entropy of the logits, and of the selector's scores among candidates

The tokens before a draft are those of the text, as in decoding if all drafts so far are accepted.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.models.config import DrafterConfig
from jaxspec.models.dflash import DFlash
from jaxspec.models.eagle3 import Eagle3
from jaxspec.models.parameters import Params
from jaxspec.models.targets import CheckpointTarget
from jaxspec.training.loss import (
    binary_cross_entropy,
    distance,
    hard_cross_entropy,
    soft_cross_entropy,
)
from jaxspec.training.recipe import Recipe


class Teacher(NamedTuple):
    """What drafts are compared with."""

    labels: Int[Array, "batch blocks drafts"]
    previous: Int[Array, "batch blocks drafts"]
    """The token before each draft."""
    target: CheckpointTarget
    """The bound target."""
    hidden: Float[Array, "batch blocks drafts target_hidden"]
    """Its hidden states of the tokens before, from which it predicts the drafts."""

    def logits(self) -> Float[Array, "batch blocks drafts vocab"]:
        return block_logits(self.target, self.hidden)


class Term(NamedTuple):
    """One part of a loss."""

    lost: Float[Array, "batch blocks drafts"]
    counts: Bool[Array, "batch blocks drafts"]
    """Which drafts count."""


class Scores(NamedTuple):
    """How well every draft of some blocks predicts its label."""

    terms: dict[str, Term]
    """The parts of the loss, by name."""
    probability: Float[Array, "batch blocks drafts"]
    """The drafter's probability of the label."""
    correct: Bool[Array, "batch blocks drafts"]
    """Whether the label is the token that the drafter would choose."""


class Wanted(NamedTuple):
    """Labels as ids of the drafter's vocabulary."""

    ids: Int[Array, "batch blocks drafts"]
    known: Bool[Array, "batch blocks drafts"]
    """Whether the label is in that vocabulary; if not, its id is 0."""


def weights_of(recipe: Recipe, kind: str) -> dict[str, float]:
    """The weight of each term in the loss."""
    if kind == "dspark":
        return dict(zip(("cross_entropy", "distance", "confidence"), recipe.weights_of_dspark))
    return {"cross_entropy": 1.0, "selection": recipe.selector_weight}


def needs_distributions(recipe: Recipe, kind: str) -> bool:
    """Whether the loss compares with the target's distributions, and not only with labels."""
    of_distributions = kind == "dspark" and any(recipe.weights_of_dspark[1:])
    return recipe.labels == "distill" or of_distributions


def scores_of(
    recipe: Recipe,
    drafter: DFlash | Eagle3,
    target_ids: Int[Array, " draft_vocab"] | None,
    drafted: Float[Array, "batch blocks drafts hidden"],
    teacher: Teacher,
) -> Scores:
    """Scores the drafts of a bound drafter, given its hidden states of them. `target_ids` are the
    target's ids of a reduced vocabulary."""
    logits = block_logits(drafter if drafter.config.owns_head else teacher.target, drafted)
    wanted = draft_ids(drafter.config, target_ids, teacher.labels)
    if isinstance(drafter, DFlash) and drafter.config.kind == "dspark":
        return _dspark(recipe, drafter, target_ids, drafted, logits, wanted, teacher)
    if isinstance(drafter, DFlash) and drafter.config.kind == "dflash2":
        return _dflash2(recipe, drafter, drafted, logits, wanted, teacher)
    return _plain(recipe, target_ids, logits, wanted, teacher)


def _plain(
    recipe: Recipe,
    target_ids: Int[Array, " draft_vocab"] | None,
    logits: Float[Array, "batch blocks drafts draft_vocab"],
    wanted: Wanted,
    teacher: Teacher,
) -> Scores:
    hard = hard_cross_entropy(logits, wanted.ids)
    # The argmax of logits that are not finite is token 0, which must not count as right.
    correct = wanted.known & (jnp.argmax(logits, axis=-1) == wanted.ids) & jnp.isfinite(hard)
    probability = jnp.where(wanted.known, jnp.exp(-hard), 0.0)
    if recipe.labels != "distill":
        return Scores({"cross_entropy": Term(hard, wanted.known)}, probability, correct)
    target_logits = teacher.logits()
    if target_ids is not None:
        target_logits = jnp.take(target_logits, target_ids, axis=-1)
    soft = soft_cross_entropy(logits, target_logits)
    term = Term(soft, jnp.ones_like(wanted.known))
    return Scores({"cross_entropy": term}, probability, correct)


def _dspark(
    recipe: Recipe,
    drafter: DFlash,
    target_ids: Int[Array, " draft_vocab"] | None,
    drafted: Float[Array, "batch blocks drafts hidden"],
    logits: Float[Array, "batch blocks drafts draft_vocab"],
    wanted: Wanted,
    teacher: Teacher,
) -> Scores:
    if drafter.config.transition is not None:
        exact = logits.dtype
        queries = queries_of(drafter, drafted, teacher.previous).astype(exact)
        keys = drafter.transition.keys(None).astype(exact)
        logits = logits + jnp.einsum("bkdr,vr->bkdv", queries, keys)
    scores = _plain(recipe, target_ids, logits, wanted, teacher)
    if not needs_distributions(recipe, "dspark"):
        return scores
    target_probabilities = jax.nn.softmax(teacher.logits(), axis=-1)
    if target_ids is not None:
        target_probabilities = jnp.take(target_probabilities, target_ids, axis=-1)
    apart, everywhere = distance(logits, target_probabilities), jnp.ones_like(wanted.known)
    terms = scores.terms | {"distance": Term(apart, everywhere)}
    if drafter.config.confidence is not None:
        confidence = drafter.confidence_logits(in_rows(drafted), in_rows(teacher.previous))
        accepted = jax.lax.stop_gradient(1 - apart / 2)
        error = binary_cross_entropy(confidence.reshape(apart.shape), accepted)
        terms["confidence"] = Term(error, everywhere)
    return scores._replace(terms=terms)


def _dflash2(
    recipe: Recipe,
    drafter: DFlash,
    drafted: Float[Array, "batch blocks drafts hidden"],
    logits: Float[Array, "batch blocks drafts draft_vocab"],
    wanted: Wanted,
    teacher: Teacher,
) -> Scores:
    terms = _plain(recipe, None, logits, wanted, teacher).terms
    transition = drafter.config.transition
    assert transition is not None and transition.candidates is not None
    ids, place, found = candidates_with_label(logits, wanted.ids, transition.candidates)
    queries = queries_of(drafter, drafted, teacher.previous).astype(logits.dtype)
    keys = drafter.transition.keys(ids).astype(logits.dtype)
    scored = jnp.take_along_axis(logits, ids, axis=-1)
    scored = scored + jnp.einsum("bkdr,bkdcr->bkdc", queries, keys)
    hard = hard_cross_entropy(scored, place)
    correct = found & (jnp.argmax(scored, axis=-1) == place) & jnp.isfinite(hard)
    probability = jnp.where(found, jnp.exp(-hard), 0.0)
    terms = terms | {"selection": Term(hard, wanted.known)}
    return Scores(terms, probability, correct)


def candidates_with_label(
    logits: Float[Array, "batch blocks drafts draft_vocab"],
    labels: Int[Array, "batch blocks drafts"],
    count: int,
) -> tuple[
    Int[Array, "batch blocks drafts candidates"],
    Int[Array, "batch blocks drafts"],
    Bool[Array, "batch blocks drafts"],
]:
    """The likeliest tokens, the place of the label among them, and whether it was found there. One
    that was not takes the place of the last."""
    _, ids = jax.lax.top_k(jax.lax.stop_gradient(logits), min(count, logits.shape[-1]))
    same = ids == labels[..., None]
    found = jnp.any(same, axis=-1)
    last = ids.shape[-1] - 1
    place = jnp.where(found, jnp.argmax(same, axis=-1), last)
    ids = ids.at[..., last].set(jnp.where(found, ids[..., last], labels))
    return ids, place, found


def queries_of(
    drafter: DFlash,
    drafted: Float[Array, "batch blocks drafts hidden"],
    previous: Int[Array, "batch blocks drafts"],
) -> Float[Array, "batch blocks drafts rank"]:
    """The transition's query at every draft, as the walk makes them one after the other."""
    transition, before = drafter.transition, in_rows(previous)
    read, state = transition.read(in_rows(drafted)), transition.start(len(before))
    queries = []
    for place in range(before.shape[1]):
        state, query = transition.query(state, before[:, place], read[:, place])
        queries.append(query)
    return jnp.stack(queries, axis=1).reshape(*previous.shape, -1)


def in_rows(
    of_blocks: Float[Array, "batch blocks drafts ..."] | Int[Array, "batch blocks drafts"],
) -> Array:
    """Blocks of all sequences as the rows of one batch."""
    return of_blocks.reshape(-1, *of_blocks.shape[2:])


def draft_ids(
    config: DrafterConfig,
    target_ids: Int[Array, " draft_vocab"] | None,
    labels: Int[Array, "batch blocks drafts"],
) -> Wanted:
    if config.draft_vocab_size is None:
        return Wanted(labels, jnp.ones_like(labels, bool))
    ids = jnp.arange(config.draft_vocab_size)
    absent = jnp.full(config.vocab_size, -1)
    found = absent.at[target_ids].set(ids)[labels]
    return Wanted(jnp.maximum(found, 0), found >= 0)


def block_logits(
    model: CheckpointTarget | DFlash | Eagle3, hidden: Float[Array, "batch blocks drafts hidden"]
) -> Float[Array, "batch blocks drafts vocab"]:
    """Float32 logits, from the head of a bound model."""
    flat = hidden.reshape(hidden.shape[0], -1, hidden.shape[-1])
    logits = model.logits(flat).astype(jnp.float32)
    return logits.reshape(*hidden.shape[:-1], -1)


def bound[Model: (CheckpointTarget, DFlash, Eagle3, DFlash | Eagle3)](
    model: Model, params: Params
) -> Model:
    """The module bound to its parameters, so that its methods can be called.

    It must be used within the jax transformation in which it was made.
    """
    return model.bind({"params": params})
