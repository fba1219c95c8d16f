"""Folders of source text as documents: found, filtered, made unique, divided."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path, PurePath

import numpy as np
import tokenizers
from jaxtyping import Int

from jaxspec.errors import LoadError
from jaxspec.training.data import Rows, rows_of_stream, text_files

MOST_SHARED = 0.2
"""Of a document's telling lines, those that may also stand in held-out documents."""

Documents = list[tuple[PurePath, str]]


@dataclasses.dataclass(frozen=True)
class Selection:
    """Which files of a folder are documents."""

    pattern: str = "*.py"
    without: tuple[str, ...] = ("site-packages", "encodings", "pydoc_data", "data", "__pycache__")
    """Names of folders that are left out, at any depth: tables and other people's code."""
    smallest: int = 200
    """Bytes."""
    largest: int = 150_000
    """Bytes; longer files are tables."""
    most_repeated: float = 0.5
    """Of a document's telling lines, those that may stand in documents before it."""


def collect(folders: Iterable[Path], selection: Selection) -> Documents:
    """Documents by their path inside the folder they came from.

    One that mostly repeats those before it, an older version for one, is left out.
    """
    documents: Documents = []
    seen: set[str] = set()
    for folder in folders:
        for path in text_files([folder], selection.pattern):
            inside, content = path.relative_to(folder), path.read_bytes()
            if not selection.smallest <= len(content) <= selection.largest:
                continue
            text = None if set(inside.parts) & set(selection.without) else decoded(content)
            if text is not None and not repeats(text, seen, selection.most_repeated):
                seen |= telling_lines(text)
                documents.append((inside, text))
    if not documents:
        raise LoadError("no text left in the folders given; expected files of UTF-8 text")
    return documents


def decoded(content: bytes) -> str | None:
    """None for another encoding: some libraries test those with files that are not UTF-8."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return None


def divide(documents: Documents, held_out: set[str]) -> tuple[Documents, Documents]:
    """Documents to train on, and those whose path inside their folder is held out.

    A document that repeats held-out ones, an older version under another name for one, is neither.
    """
    unseen = [d for d in documents if d[0].as_posix() in held_out]
    hidden = {line for _, text in unseen for line in telling_lines(text)}
    kept = [
        (path, text)
        for path, text in documents
        if path.as_posix() not in held_out and not repeats(text, hidden, MOST_SHARED)
    ]
    return kept, unseen


def set_aside(documents: Documents, share: float, seed: int) -> tuple[Documents, Documents]:
    """The documents but a random share of them, and that share."""
    chosen = np.random.default_rng(seed).permutation(len(documents))
    aside = set(chosen[: round(share * len(documents))].tolist())
    kept = [document for i, document in enumerate(documents) if i not in aside]
    return kept, [documents[i] for i in sorted(aside)]


def repeats(text: str, others: set[str], most: float) -> bool:
    lines = telling_lines(text)
    return len(lines & others) > most * max(len(lines), 1)


def telling_lines(text: str) -> set[str]:
    """Lines long enough not to be written twice by chance."""
    return {line.strip() for line in text.splitlines() if len(line.strip()) >= 30}


def rows_of_corpus(
    documents: Documents,
    tokenizer: tokenizers.Tokenizer,
    end_token: int,
    length: int,
    seed: int,
) -> Rows:
    """Documents in a random order, each ended, cut into rows wherever the length is reached."""
    return rows_of_stream(stream_of_corpus(documents, tokenizer, end_token, seed), length)


def windows_of_corpus(
    documents: Documents,
    tokenizer: tokenizers.Tokenizer,
    end_token: int,
    length: int,
    count: int,
    seed: int,
) -> Rows:
    """Rows from random places, of which there may be more than the text has without overlap."""
    stream = stream_of_corpus(documents, tokenizer, end_token, seed)
    places = len(rows_of_stream(stream, length).tokens) * length - length + 1
    starts = np.random.default_rng(seed).integers(0, places, count)
    return Rows(stream[starts[:, None] + np.arange(length)], np.zeros(count, np.int32))


def stream_of_corpus(
    documents: Documents, tokenizer: tokenizers.Tokenizer, end_token: int, seed: int
) -> Int[np.ndarray, " tokens"]:
    order = np.random.default_rng(seed).permutation(len(documents))
    texts = [documents[i][1] for i in order]
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    return np.concatenate([np.array([*one.ids, end_token], np.int32) for one in encoded])
