"""What the drafter's own probabilities are worth, learned from what became of its drafts."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.acceptance.scores import (
    EDGES,
    after_verified,
    no_scores,
    with_drafts,
    with_scores,
    without_drafts,
)


def learned(means_something: bool, steps: int = 200) -> tuple:
    """Scores after steps of four requests, each draft of which outcomes alone give 0.5."""
    random, scores = np.random.default_rng(0), no_scores(5, 3)
    expected = jnp.full((4, 3), 0.5)
    for _ in range(steps):
        own = random.choice(np.float32([0.05, 0.58, 0.99]), (4, 3))
        right = random.random((4, 3)) < (own if means_something else 0.5)
        accepted = jnp.asarray(np.cumprod(right, axis=1).sum(axis=1), jnp.int32)
        verified = jnp.array([3, 3, 3, 0]), jnp.where(jnp.arange(4) < 3, accepted, 0)
        scores = after_verified(scores, jnp.asarray(own), expected, *verified)
    return scores, expected


def test_likelier_drafts_get_better_chances_if_scores_mean_something():
    scores, half = learned(means_something=True)
    own = jnp.tile(jnp.array([0.05, 0.58, 0.99]), (4, 1))
    chances = with_scores(scores, own, half)[0]
    assert chances.tolist() == pytest.approx([0.1, 0.58, 0.95], abs=0.12)
    assert with_scores(scores, own, half + 0.3)[0, 0] > chances[0], "the request counts as well"


def test_scores_that_mean_nothing_change_little():
    scores, half = learned(means_something=False)
    own = jnp.tile(jnp.array([0.05, 0.58, 0.99]), (4, 1))
    assert with_scores(scores, own, half) == pytest.approx(np.full((4, 3), 0.5), abs=0.12)


def test_nothing_is_known_at_first_nor_of_drafts_without_scores():
    chances = jnp.array([[0.3, 0.7, 0.9]])
    fresh = with_scores(no_scores(2, 3), jnp.array([[0.01, 0.5, 1.0]]), chances)
    np.testing.assert_allclose(fresh, chances, rtol=1e-5)
    scores, _ = learned(means_something=True)
    unscored = with_scores(scores, jnp.zeros((1, 3)), chances)
    np.testing.assert_allclose(unscored, chances, rtol=1e-5)


def test_only_drafts_that_were_tried_count():
    own = jnp.array([[0.05, 0.3, 0.6, 0.95]])
    chances = jnp.full((1, 4), 0.5)
    after = after_verified(no_scores(2, 4), own, chances, jnp.array([3]), jnp.array([1]))
    bins = [int(np.searchsorted(EDGES, score)) for score in (0.05, 0.3)]
    assert np.flatnonzero(after.tried).tolist() == bins, "the place after a refusal was not tried"
    assert np.flatnonzero(after.kept).tolist() == bins[:1]
    assert after.expected.sum() == 1.0


def test_scores_lie_at_their_slots_until_the_next_drafts():
    scores = with_drafts(no_scores(4, 3), jnp.array([2, 0]), jnp.array([[0.1, 0.2], [0.3, 0.4]]))
    assert scores.of_slots[:3].tolist() == [
        pytest.approx([0.3, 0.4, 0]),
        [0, 0, 0],
        pytest.approx([0.1, 0.2, 0]),
    ]
    assert not with_drafts(scores, jnp.array([2, 0]), None).of_slots.any()
    assert without_drafts(scores, jnp.array(False)).of_slots.any()
    assert not without_drafts(scores, jnp.array(True)).of_slots.any()
