"""Prompt lookup on the device says what the index on the host says."""

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

ROWS, POSITIONS, PLACES = 6, 30, 7

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


def on_the_device(lookup: Lookup, rows: list[list[int]]) -> list[list[int]]:
    """Beyond a row's tokens lies what looks like them."""
    tokens = np.ones((ROWS, POSITIONS), np.int32)
    for row, own in zip(tokens, rows):
        row[: len(own)] = own
    counts = jnp.asarray([len(own) for own in rows], jnp.int32)
    drafts, found = compiled(lookup)(jnp.asarray(tokens), counts)
    return [row[:n].tolist() for row, n in zip(np.asarray(drafts), np.asarray(found))]


row = st.lists(st.integers(0, 2), min_size=1, max_size=POSITIONS)


@pytest.mark.parametrize("options", CASES, ids=str)
@settings(max_examples=60, deadline=None)
@given(st.lists(row, min_size=ROWS, max_size=ROWS))
def test_it_equals_the_index(options, rows):
    lookup = lookup_of(options, PLACES)
    room = min(options.num_drafts, PLACES)
    expected = [by_the_index(options, own, room) for own in rows]
    assert on_the_device(lookup, rows) == expected


def test_rows_without_a_match_draft_nothing():
    rows = [[1, 2, 3], [5], [7, 8, 7], [1, 2, 3, 4], [9, 9], [2, 3, 2, 4, 2]]
    found = on_the_device(lookup_of(SpeculationOptions(), PLACES), rows)
    assert found == [[], [], [8, 7], [], [9], [4, 2]]
