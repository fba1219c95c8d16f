"""Acceptance against a plain loop."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.acceptance import accept


def accepted_by_hand(drafts: list[int], target_tokens: list[int], num_drafts: int) -> int:
    accepted = 0
    for draft, token in list(zip(drafts, target_tokens))[:num_drafts]:
        if draft != token:
            break
        accepted += 1
    return accepted


@st.composite
def steps(draw):
    batch, count = draw(st.integers(1, 5)), draw(st.integers(0, 6))
    tokens = lambda length: st.lists(st.integers(0, 2), min_size=length, max_size=length)
    drafts = [draw(tokens(count)) for _ in range(batch)]
    target_tokens = [draw(tokens(count + 1)) for _ in range(batch)]
    num_drafts = [draw(st.integers(0, count)) for _ in range(batch)]
    return drafts, target_tokens, num_drafts


@settings(max_examples=300, deadline=None)
@given(steps())
def test_is_the_longest_prefix_of_the_target_s_tokens(step):
    accepted = accept(*(np.array(part, np.int32) for part in step))
    assert isinstance(accepted, np.ndarray)
    assert accepted.tolist() == [accepted_by_hand(*request) for request in zip(*step)]


@pytest.mark.parametrize("count", [0, 1, 7])
def test_numpy_and_jax_agree(count):
    random = np.random.default_rng(count)
    drafts = random.integers(0, 2, (64, count), np.int32)
    target_tokens = random.integers(0, 2, (64, count + 1), np.int32)
    num_drafts = random.integers(0, count + 1, 64, np.int32)
    by_numpy = accept(drafts, target_tokens, num_drafts)
    by_jax = accept(jnp.asarray(drafts), jnp.asarray(target_tokens), jnp.asarray(num_drafts))
    assert by_jax.dtype == by_numpy.dtype == np.int32
    assert by_jax.tolist() == by_numpy.tolist()
    assert by_numpy.max(initial=0) <= count
