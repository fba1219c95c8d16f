"""Prompt lookup on the device proposes what the index on the host proposes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.proposers.lookup import Lookup, look_up, lookup_of
from jaxspec.proposers.ngram_index import NgramIndex
from jaxspec.proposers.options import SpeculationOptions

BATCH, POSITIONS, ROOM = 6, 30, 7

CASES = [
    SpeculationOptions(),
    SpeculationOptions(ngram_match="earliest", num_drafts=3),
    SpeculationOptions(min_ngram=2, max_ngram=3, num_drafts=9),
    SpeculationOptions(min_ngram=3, max_ngram=3, ngram_match="earliest", num_drafts=1),
    SpeculationOptions(max_ngram=2, ngram_look_back=5),
    SpeculationOptions(max_ngram=40, ngram_look_back=41),
]
compiled = functools.cache(lambda lookup: jax.jit(functools.partial(look_up, lookup)))


def by_the_index(options: SpeculationOptions, tokens: list[int], room: int) -> list[int]:
    sizes = options.min_ngram, options.max_ngram
    index = NgramIndex(*sizes, options.ngram_match, options.ngram_look_back)
    index.extend(tokens)
    return index.continuation(room)


def on_the_device(lookup: Lookup, requests: list[list[int]]) -> list[list[int]]:
    """Positions beyond a request's tokens hold tokens that look like its own."""
    tokens = np.ones((BATCH, POSITIONS), np.int32)
    for kept, own in zip(tokens, requests):
        kept[: len(own)] = own
    counts = jnp.asarray([len(own) for own in requests], jnp.int32)
    drafts, num_drafts = map(np.asarray, compiled(lookup)(jnp.asarray(tokens), counts))
    return [own[:count].tolist() for own, count in zip(drafts, num_drafts)]


request = st.lists(st.integers(0, 2), min_size=1, max_size=POSITIONS)


@pytest.mark.parametrize("options", CASES, ids=str)
@settings(max_examples=60, deadline=None)
@given(st.lists(request, min_size=BATCH, max_size=BATCH))
def test_it_equals_the_index(options, requests):
    lookup = lookup_of(options, ROOM)
    room = min(options.drafts_of_lookup, ROOM)
    expected = [by_the_index(options, own, room) for own in requests]
    assert on_the_device(lookup, requests) == expected


def test_requests_without_a_match_draft_nothing():
    requests = [[1, 2, 3], [5], [7, 8, 7], [1, 2, 3, 4], [9, 9], [2, 3, 2, 4, 2]]
    drafts = on_the_device(lookup_of(SpeculationOptions(), ROOM), requests)
    assert drafts == [[], [], [8, 7], [], [9], [4, 2]]
