"""Prompt lookup against a scan of everything, and each of its rules alone."""

import gc
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.proposers.ngram_index import NgramIndex


def scanned(tokens: list[int], low: int, high: int, match: str, look_back: int, room: int):
    """Tries every start for every size, longest size first."""
    length = len(tokens)
    for size in range(min(high, length - 1), low - 1, -1):
        starts = range(max(0, length - look_back), length - size)
        for start in starts if match == "earliest" else reversed(starts):
            if tokens[start : start + size] == tokens[length - size :]:
                return tokens[start + size : start + size + room]
    return []


def index_of(tokens: list[int], low=1, high=5, match="recent", look_back=1000) -> NgramIndex:
    index = NgramIndex(low, high, match, look_back)
    index.extend(tokens)
    return index


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 2), max_size=60),
    st.integers(1, 3),
    st.integers(0, 3),
    st.sampled_from(["recent", "earliest"]),
    st.integers(1, 20),
    st.integers(1, 8),
)
def test_equals_a_scan_after_every_token(tokens, low, more, match, wider, room):
    high = low + more
    index = NgramIndex(low, high, match, look_back=high + wider)
    for count, token in enumerate(tokens, 1):
        index.extend([token])
        expected = scanned(tokens[:count], low, high, match, high + wider, room)
        assert index.continuation(room) == expected


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([1, 2, 3, 9, 3, 8, 1, 2, 3], [9, 3, 8, 1]),
        ([7, 3, 9, 3, 8, 1, 2, 3], [8, 1, 2, 3]),
    ],
    ids=["the longest suffix, though a shorter one came later", "else a shorter one"],
)
def test_longest_suffix_first_then_fallback(tokens, drafts):
    assert index_of(tokens).continuation(4) == drafts


def test_recent_or_earliest():
    tokens = [5, 1, 7, 5, 2, 6, 5]
    assert index_of(tokens, match="recent").continuation(2) == [2, 6]
    assert index_of(tokens, match="earliest").continuation(2) == [1, 7]


def test_an_occurrence_may_overlap_the_suffix_and_ends_with_the_tokens():
    assert index_of([4, 4, 4, 4]).continuation(3) == [4]
    assert index_of([4, 4, 4, 4], match="earliest").continuation(3) == [4]
    assert index_of([1, 2, 1, 2, 1, 2], match="earliest").continuation(5) == [1, 2]


@pytest.mark.parametrize("tokens", [[], [1], [1, 2, 3]])
def test_too_short_or_never_seen_gives_nothing(tokens):
    assert index_of(tokens).continuation(4) == []


def test_runs_shorter_than_the_least_are_not_looked_up():
    assert index_of([3, 9, 3], low=2).continuation(4) == []
    assert index_of([3, 9, 3], low=1).continuation(4) == [9, 3]


@pytest.mark.parametrize("room", [1, 3, 9])
def test_no_more_than_there_is_room_for(room):
    tokens = [1, 2, 3, 4, 5, 6, 1]
    assert index_of(tokens).continuation(room) == [2, 3, 4, 5, 6, 1][:room]


def test_look_back_bounds_what_is_kept():
    index = index_of([i % 50 for i in range(3000)], look_back=100)
    counts = (len(ends) if isinstance(ends, deque) else 1 for ends in index.ends.values())
    assert sum(counts) <= 5 * 100
    assert index_of([1, 2, *[3] * 6, 1], look_back=8).continuation(1) == []
    assert index_of([1, 2, *[3] * 6, 1], look_back=9).continuation(1) == [2]


def test_text_that_never_repeats_leaves_the_garbage_collector_nothing():
    """Deques for every run were looked through for 150 ms at a time, between two steps."""
    index = NgramIndex(1, 5, "recent", 100_000)
    gc.collect()
    before = len(gc.get_objects())
    index.extend(range(5_000))
    gc.collect()
    assert len(index.ends) > 20_000
    assert len(gc.get_objects()) - before < 500


def test_work_per_token_and_lookup_does_not_grow():
    """Counted in touches of the table, not in seconds."""
    touched = []

    class Counting(dict):
        def __getitem__(self, run):
            touched.append(run)
            return super().__getitem__(run)

        def get(self, run, default=None):
            touched.append(run)
            return super().get(run, default)

    index = index_of([], look_back=40)
    index.ends = Counting()
    costs = []
    for at in range(400):
        touched.clear()
        index.extend([at % 7])
        index.continuation(7)
        costs.append(len(touched))
    assert max(costs[:60]) == max(costs) <= 3 * 5


def test_two_with_the_same_tokens_are_equal():
    assert index_of([1, 2, 1]) == index_of([1, 2, 1]) != index_of([1, 2, 2])
