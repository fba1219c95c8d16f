"""What is uploaded as one array is the same again on the device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.engine.step.io import Admission, PromptChunk
from jaxspec.engine.step.packed import packed_admission, packed_chunk
from jaxspec.sampling import SlotSampling

INTEGERS = jnp.array([3, 5], jnp.int32)
TOKENS = jnp.arange(8, dtype=jnp.int32).reshape(2, 4)


def same(found, expected) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        assert one.dtype == other.dtype and np.array_equal(one, other)


@pytest.mark.parametrize("following", [None, TOKENS + 1])
def test_a_chunk(following):
    rows = INTEGERS, TOKENS, INTEGERS + 1, INTEGERS + 2, INTEGERS + 3, following
    same(packed_chunk(PromptChunk(*rows)).chunk, PromptChunk(*rows))


def test_a_chunk_whose_next_tokens_are_all_to_be_chosen():
    found = packed_chunk(PromptChunk(INTEGERS, TOKENS, INTEGERS, INTEGERS)).chunk
    assert found.known.tolist() == [-1, -1]


@pytest.mark.parametrize("tokens", [None, TOKENS])
def test_an_admission(tokens):
    """Seeds use all of their 32 bits."""
    seeds = jnp.array([2**32 - 1, 7], jnp.uint32)
    numbers = jnp.array([0.7, 1e-9], jnp.float32)
    sampling = SlotSampling(numbers, INTEGERS + 4, numbers / 2, numbers / 3, seeds)
    rows = INTEGERS, TOKENS[:, :3], INTEGERS + 1, INTEGERS + 2, sampling, tokens
    same(packed_admission(Admission(*rows)).admission, Admission(*rows))
