"""What a step verifies if it cannot verify everything: the drafts that are likeliest accepted."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.acceptance.outcomes import after_step, no_outcomes, survival
from jaxspec.acceptance.shares import expected_tokens, shared_out


def test_the_picture():
    chances = np.array([[0.9, 0.8, 0.7, 0.6], [0.5, 0.3, 0.1, 0.0]], np.float32)
    shares = shared_out(jnp.asarray(chances), jnp.array([4, 4]), jnp.array(5))
    assert shares.tolist() == [4, 1]
    assert expected_tokens(chances, 5) == pytest.approx(2 + 3.5)
    assert shared_out(jnp.asarray(chances), jnp.array([2, 4]), jnp.array(5)).tolist() == [2, 3]
    assert shared_out(jnp.asarray(chances), jnp.array([0, 4]), jnp.array(5)).tolist() == [0, 4]
    assert shared_out(jnp.asarray(chances), jnp.array([4, 4]), jnp.array(99)).tolist() == [4, 4]


@given(
    rates=st.lists(
        st.lists(st.floats(0, 1, width=32), min_size=3, max_size=3), min_size=1, max_size=6
    ),
    limits=st.lists(st.integers(0, 3), min_size=6, max_size=6),
    budget=st.integers(0, 20),
)
def test_no_other_choice_expects_more(rates, limits, budget):
    chances = np.cumprod(np.array(rates, np.float32), axis=1)
    num_drafts = np.array(limits[: len(rates)], np.int32)
    shares = np.asarray(
        shared_out(jnp.asarray(chances), jnp.asarray(num_drafts), jnp.array(budget))
    )
    assert (shares <= num_drafts).all() and shares.sum() == min(budget, num_drafts.sum())
    gained = sum(line[:share].sum() for line, share in zip(chances, shares))
    exists = np.arange(3) < num_drafts[:, None]
    best = np.sort(chances[exists])[::-1][:budget].sum()
    assert gained == pytest.approx(best, abs=1e-5)


def test_outcomes_count_what_was_tried():
    zero = np.zeros((3, 4))
    tried, kept = after_step(zero, zero, np.array([4, 2, 0]), np.array([1, 2, 0]))
    assert tried.tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]
    assert kept.tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]
    later, _ = after_step(tried, kept, np.array([0, 4, 0]), np.array([0, 4, 0]))
    assert later[0].tolist() == [1, 1, 0, 0], "a step without drafts says nothing"
    assert later[1].tolist() == pytest.approx([1.9, 1.9, 1, 1])


def test_chances_follow_the_outcomes():
    fresh = survival(*(np.zeros((2, 3)) for _ in range(2)))
    assert fresh[0] == pytest.approx([0.8, 0.64, 0.512])
    tried = kept = np.zeros((2, 3))
    for _ in range(30):
        tried, kept = after_step(tried, kept, np.array([3, 3]), np.array([3, 0]))
    chances = survival(tried, kept)
    assert chances[0, 2] > 0.7 and chances[1, 0] < 0.25, "each request has its own"
    assert (np.diff(chances, axis=1) <= 0).all()


def test_a_place_that_was_never_tried_is_like_the_one_before():
    tried = kept = np.zeros((1, 3))
    for _ in range(40):
        tried, kept = after_step(tried, kept, np.array([2]), np.array([2]))
    chances = survival(tried, kept)[0]
    assert chances[2] / chances[1] == pytest.approx(chances[1] / chances[0], rel=0.1)
    assert chances[2] > 0.75


def test_numpy_and_jax_agree():
    random = np.random.default_rng(0)
    tried = 5 * random.random((6, 7))
    kept = tried * random.random((6, 7))
    single = lambda numbers: jnp.asarray(numbers, jnp.float32)
    np.testing.assert_allclose(
        survival(single(tried), single(kept)), survival(tried, kept), atol=1e-5
    )
    drafts, accepted = random.integers(0, 8, 6), np.zeros(6, int)
    for ours, theirs in zip(
        after_step(single(tried), single(kept), jnp.asarray(drafts), jnp.asarray(accepted)),
        after_step(tried, kept, drafts, accepted),
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert no_outcomes(3, 7).tried.shape == (3, 7)
