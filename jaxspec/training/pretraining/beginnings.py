"""Beginnings that a target continues: the headers of functions and classes, as a person types them;
and which of its continuations only repeat themselves."""

import re
from collections.abc import Sequence

import numpy as np
import tokenizers
from jaxtyping import Bool, Int

from jaxspec.errors import LoadError
from jaxspec.training.data import Sequences
from jaxspec.training.pretraining.corpus import Document

HEADER = re.compile(r"^(?:(?:async )?def \w+\(|class \w+)[^\n]*\n", re.MULTILINE)
"""A line that begins a function or a class, at the left margin."""
FEWEST_TOKENS = 2
LONGEST_PERIOD = 64
"""The most tokens of a piece that counts as repeated at the end of a sequence."""


def headers_of(documents: Sequence[Document]) -> list[str]:
    """Every header, in the documents' order, once each."""
    found = (match[0] for _, text in documents for match in HEADER.finditer(text))
    return list(dict.fromkeys(found))


def header_sequences(
    documents: Sequence[Document],
    tokenizer: tokenizers.Tokenizer,
    end_token: int,
    length: int,
    longest: int,
    count: int,
    seed: int,
) -> Sequences:
    """`count` headers, each as often as the others; every second one ends at its opening bracket.

    What follows a header is filled with end tokens, to be replaced.
    """
    headers = headers_of(documents)
    if not headers:
        raise LoadError("no function begins at the left margin of a document; give Python text")
    draw = np.random.default_rng([seed, count])
    rounds = [draw.permutation(len(headers)) for _ in range(-(-count // len(headers)))]
    chosen = np.concatenate(rounds)[:count]
    texts = [cut(headers[i]) if n % 2 else headers[i] for n, i in enumerate(chosen)]
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    tokens = np.full((count, length), end_token, np.int32)
    first = np.empty(count, np.int32)
    for row, one in enumerate(encoded):
        ids = one.ids[:longest]
        first[row] = max(len(ids), FEWEST_TOKENS)
        tokens[row, : len(ids)] = ids
    return Sequences(tokens, first)


def cut(header: str) -> str:
    """A header up to its opening bracket, or without its end of line."""
    name, bracket, _ = header.partition("(")
    return name + bracket if bracket else header.rstrip()


def without_loops(sequences: Sequences, most: float) -> Sequences:
    """The sequences whose end repeats itself for at most this share of what was generated."""
    length = sequences.tokens.shape[1]
    generated = length - sequences.first
    return sequences.take(np.flatnonzero(repeated_at_end(sequences.tokens) <= most * generated))


def distinct(sequences: Sequences) -> Sequences:
    """Each sequence once: two equal beginnings have the same greedy continuation."""
    _, indices = np.unique(sequences.tokens, axis=0, return_index=True)
    return sequences.take(np.sort(indices))


def repeated_at_end(tokens: Int[np.ndarray, "sequences length"]) -> Int[np.ndarray, " sequences"]:
    """How many tokens at the end of each row equal the tokens one period before them, for the
    period with the most such tokens. A piece counts only if it is repeated at least twice."""
    most = np.zeros(len(tokens), np.int64)
    for period in range(1, min(LONGEST_PERIOD, tokens.shape[1] // 3) + 1):
        run = run_at_end(tokens[:, period:] == tokens[:, :-period])
        most = np.maximum(most, np.where(run >= 2 * period, run, 0))
    return most


def run_at_end(same: Bool[np.ndarray, "sequences length"]) -> Int[np.ndarray, " sequences"]:
    """How many values are true at the end of each row."""
    backwards = ~same[:, ::-1]
    return np.where(backwards.any(axis=1), backwards.argmax(axis=1), same.shape[1])
