"""Acceptance against a loop that anybody can read."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.acceptance import accept


def accepted_by_hand(drafts: list[int], said: list[int], num_drafts: int) -> int:
    accepted = 0
    for draft, token in list(zip(drafts, said))[:num_drafts]:
        if draft != token:
            break
        accepted += 1
    return accepted


@st.composite
def steps(draw):
    slots, count = draw(st.integers(1, 5)), draw(st.integers(0, 6))
    token = st.integers(0, 2)
    row = lambda width: st.lists(token, min_size=width, max_size=width)
    rows = [(draw(row(count)), draw(row(count + 1))) for _ in range(slots)]
    num_drafts = [draw(st.integers(0, count)) for _ in range(slots)]
    return rows, num_drafts, count


@settings(max_examples=300, deadline=None)
@given(steps())
def test_is_the_longest_prefix_that_the_target_says_too(step):
    rows, num_drafts, count = step
    drafts = np.array([row[0] for row in rows], np.int32).reshape(len(rows), count)
    said = np.array([row[1] for row in rows], np.int32)
    accepted = accept(drafts, said, np.array(num_drafts, np.int32))
    assert isinstance(accepted, np.ndarray)
    assert accepted.tolist() == [accepted_by_hand(*row, n) for row, n in zip(rows, num_drafts)]


@pytest.mark.parametrize("count", [0, 1, 7])
def test_numpy_and_jax_agree(count):
    random = np.random.default_rng(count)
    drafts = random.integers(0, 2, (64, count), np.int32)
    said = random.integers(0, 2, (64, count + 1), np.int32)
    num_drafts = random.integers(0, count + 1, 64, np.int32)
    by_numpy = accept(drafts, said, num_drafts)
    by_jax = accept(jnp.asarray(drafts), jnp.asarray(said), jnp.asarray(num_drafts))
    assert by_jax.dtype == by_numpy.dtype == np.int32
    assert by_jax.tolist() == by_numpy.tolist()
    assert by_numpy.max(initial=0) <= count
