"""The cache's two verbs hold for a layer that cannot go back: whatever part of each block was
accepted, what follows is what decoding token by token gives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.block import Block, block_after
from jaxspec.cache.cache import Cache, LayerCache
from jaxspec.models.target import Target
from models.toy_recurrent import ToyRecurrent

DRAFTS = 4
SLOTS, PADDING = 3, 3
LENGTH = 24
MODEL = ToyRecurrent(capture=(0, 1))
PARAMS = MODEL.random_params()
TOKENS = np.random.default_rng(0).integers(0, MODEL.vocab_size, (SLOTS + 1, LENGTH))


@jax.jit
def write(tokens: jax.Array, block: Block, cache: Cache):
    return MODEL.apply({"params": PARAMS}, tokens, block, cache)


commit = jax.jit(Cache.commit)


class Decoding:
    """Some slots, what each of them has read so far, and the hidden states that came out."""

    def __init__(self):
        self.cache = MODEL.new_cache(SLOTS + 1, 1, 1)
        self.lengths = np.zeros(SLOTS + 1, np.int32)
        self.hidden = [[] for _ in range(SLOTS)]

    def step(self, slots: list[int], counts: list[int], width: int) -> None:
        """Writes `width` tokens in every slot, of which `counts` are right, and keeps those."""
        rng, lengths = np.random.default_rng(int(self.lengths.sum())), self.lengths[slots]
        tokens = rng.integers(0, MODEL.vocab_size, (len(slots), width))
        for row, (slot, length, count) in enumerate(zip(slots, lengths, counts)):
            tokens[row, :count] = TOKENS[slot, length : length + count]
        table = jnp.zeros((len(slots), 1), jnp.int32)
        block_of = lambda counts: block_after(
            *map(jnp.asarray, (slots, lengths, counts)), table, width, 1
        )
        active = [width if count else 0 for count in counts]
        hidden, _, written = write(jnp.asarray(tokens), block_of(active), self.cache)
        self.cache = commit(written, block_of(counts))
        for row, (slot, count) in enumerate(zip(slots, counts)):
            if slot != PADDING:
                self.hidden[slot] += [*np.asarray(hidden[row, :count])]
                self.lengths[slot] += count


@functools.cache
def token_by_token() -> list[np.ndarray]:
    decoding = Decoding()
    for _ in range(LENGTH):
        decoding.step([0, 1, 2], [1, 1, 1], width=1)
    return [np.stack(hidden) for hidden in decoding.hidden]


def check(decoding: Decoding) -> None:
    for slot, expected in enumerate(token_by_token()):
        length = decoding.lengths[slot]
        np.testing.assert_array_equal(np.stack(decoding.hidden[slot]), expected[:length])


def test_it_is_a_target_with_caches():
    assert isinstance(MODEL, Target) and hash(MODEL) == hash(ToyRecurrent(capture=(0, 1)))
    assert all(isinstance(states, LayerCache) for states in MODEL.new_cache(1, 1, 1).layers)


@pytest.mark.parametrize("accepted", range(DRAFTS + 1))
def test_every_acceptance_length(accepted):
    decoding = Decoding()
    while decoding.lengths.max() + accepted + 1 <= LENGTH:
        decoding.step([0, 1, 2], [accepted + 1] * 3, DRAFTS + 1)
    assert decoding.lengths.max() > LENGTH - DRAFTS - 1
    check(decoding)


def test_lengths_mixed_with_idle_and_padding_slots():
    """Prompts in chunks first; then every acceptance length beside every other, slots out of order,
    slots that take no part, and more than one request that only pads the batch."""
    decoding, rng = Decoding(), np.random.default_rng(1)
    decoding.step([2, 0, PADDING], [5, 3, 0], width=8)
    decoding.step([1, 0, PADDING], [1, 2, 0], width=8)
    while decoding.lengths[:SLOTS].max() + DRAFTS + 1 <= LENGTH:
        slots = [*rng.permutation(SLOTS), PADDING, PADDING]
        counts = [*rng.integers(0, DRAFTS + 2, SLOTS), 0, 0]
        decoding.step([int(slot) for slot in slots], [int(n) for n in counts], DRAFTS + 1)
    assert decoding.lengths[:SLOTS].min() > 8
    check(decoding)


def test_a_slot_forgets_the_request_before():
    decoding = Decoding()
    decoding.step([0, 1, 2], [4, 5, 3], DRAFTS + 1)
    decoding.lengths[1], decoding.hidden[1] = 0, []
    for _ in range(4):
        decoding.step([0, 1, 2], [2, 3, 1], DRAFTS + 1)
    check(decoding)
