"""Beginnings for on-policy data are function headers, and continuations that loop are found."""

from pathlib import PurePath

import numpy as np

from jaxspec.training.data import Sequences
from jaxspec.training.pretraining.beginnings import (
    distinct,
    header_sequences,
    headers_of,
    repeated_at_end,
    without_loops,
)
from jaxspec.training.pretraining.bpe import END, special_id, train_tokenizer

SOURCE = """import os

def first(a, b):
    def inner(c):
        return c
    return inner(a)

class Second(list):
    async def method(self):
        pass

async def third():
    pass
"""
DOCUMENTS = [(PurePath("a.py"), SOURCE), (PurePath("b.py"), SOURCE)]


def test_headers_at_the_left_margin_count_once():
    expected = ["def first(a, b):\n", "class Second(list):\n", "async def third():\n"]
    assert headers_of(DOCUMENTS) == expected


def test_every_second_sequence_begins_only_up_to_the_bracket():
    tokenizer = train_tokenizer([SOURCE], 300)
    end = special_id(tokenizer, END)
    rows = header_sequences(DOCUMENTS, tokenizer, end, 40, 30, count=6, seed=0)
    begun = [tokenizer.decode(row[:n]) for row, n in zip(rows.tokens, rows.first)]
    assert set(begun[0::2]) <= set(headers_of(DOCUMENTS))
    assert set(begun[1::2]) <= {"def first(", "class Second(", "async def third("}
    names = ("first", "Second", "third")
    assert [sum(name in text for text in begun) for name in names] == [2, 2, 2]
    for row, n in zip(rows.tokens, rows.first):
        assert 2 <= n <= 30 and set(row[n:].tolist()) == {end}


def test_what_repeats_at_the_end_is_counted():
    tokens = np.arange(240).reshape(4, 60)
    tokens[1, 30:] = np.tile([1, 2, 3], 10)
    tokens[2, 48:] = 7
    tokens[3, 10:50] = 5  # in the middle
    assert repeated_at_end(tokens).tolist() == [0, 27, 11, 0]

    sequences = Sequences(tokens, np.full(4, 20, np.int32))
    kept = without_loops(sequences, most=0.5)
    np.testing.assert_array_equal(kept.tokens, tokens[[0, 2, 3]])
    np.testing.assert_array_equal(without_loops(sequences, most=1.0).tokens, tokens)


def test_equal_sequences_stay_once_in_their_order():
    sequences = Sequences(np.array([[3, 4], [1, 2], [3, 4]]), np.array([1, 0, 1]))
    once = distinct(sequences)
    assert once.tokens.tolist() == [[3, 4], [1, 2]] and once.first.tolist() == [1, 0]
