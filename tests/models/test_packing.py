"""Tokens of blocks side by side without padding: the same numbers as with padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.cache.block import block_after
from jaxspec.cache.packing import packing_of
from jaxspec.layers.decoder import Decoder
from jaxspec.layers.rope import Rope
from jaxspec.models.config import Qwen3Config
from jaxspec.models.parameters import random_params
from jaxspec.models.qwen3 import Qwen3

PAGE, WIDTH = 16, 5
DECODER = Decoder(32, 64, 3, 4, 2, 16, 1e-6, Rope(1e6), 512)


@given(
    counts=st.sampled_from([1, 3, 7]).flatmap(
        lambda requests: st.lists(st.integers(0, WIDTH), min_size=requests, max_size=requests)
    ),
    more=st.sampled_from([0, 4, 8]),
)
def test_every_kept_token_has_one_place(counts, more):
    """Places are a multiple of four, because every other shape is compiled anew."""
    spare = -sum(counts) % 4 + more
    packing = packing_of(jnp.array(counts, jnp.int32), WIDTH, sum(counts) + spare)
    padded = np.arange(len(counts) * WIDTH).reshape(len(counts), WIDTH)
    packed = np.asarray(packing.pack(jnp.asarray(padded)))[:, 0]
    kept = [padded[i, :count] for i, count in enumerate(counts)]
    assert packed[: sum(counts)].tolist() == [int(one) for line in kept for one in line]
    assert np.asarray(packing.filled).tolist() == [True] * sum(counts) + [False] * spare
    if sum(counts) + spare:
        back = np.asarray(packing.unpack(jnp.asarray(packed)[:, None]))
        for line, count in zip(zip(back, padded), counts):
            assert line[0][:count].tolist() == line[1][:count].tolist()


@pytest.mark.parametrize("counts", [[3, 1, 5, 0], [5, 5, 5, 5], [1, 1, 1, 1], [0, 0, 2, 0]])
def test_the_target_over_packed_tokens(counts):
    target = Qwen3(Qwen3Config(DECODER, 97, True), (0, 2))
    params = random_params(target, jax.random.key(0))
    tables = jnp.arange(1, 13, dtype=jnp.int32).reshape(4, 3)
    lengths = jnp.array([20, 3, 31, 7], jnp.int32)
    context = jax.random.randint(jax.random.key(1), (4, 32), 0, 97)
    cache = target.new_cache(5, 13, PAGE)
    slots = jnp.arange(4, dtype=jnp.int32)
    before = block_after(slots, jnp.zeros(4, jnp.int32), lengths, tables, 32, PAGE)
    _, _, cache = target.apply({"params": params}, context, before, cache)
    block = block_after(slots, lengths, jnp.array(counts, jnp.int32), tables, WIDTH, PAGE)
    tokens = jax.random.randint(jax.random.key(2), (4, WIDTH), 0, 97)
    packing = packing_of(block.counts, WIDTH, 24)
    hidden, features, padded_cache = target.apply({"params": params}, tokens, block, cache)
    packed = target.apply({"params": params}, tokens, block, cache, packing)
    for padded, one in zip((hidden, features), packed[:2]):
        for request, count in enumerate(counts):
            np.testing.assert_allclose(
                packing.unpack(one)[request, :count], padded[request, :count], atol=2e-6
            )
    own = lambda entries: entries.reshape(13, PAGE, -1)[1:]
    for ours, theirs in zip(packed[2].layers, padded_cache.layers):
        np.testing.assert_allclose(own(ours.keys), own(theirs.keys), atol=2e-6)
        np.testing.assert_allclose(own(ours.values), own(theirs.values), atol=2e-6)
