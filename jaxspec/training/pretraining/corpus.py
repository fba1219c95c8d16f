"""Collects documents from folders of source text: finds, filters, deduplicates and divides them."""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath

import numpy as np
import tokenizers
from jaxtyping import Int

from jaxspec.errors import LoadError
from jaxspec.training.data import Sequences, sequences_of_stream
from jaxspec.training.documents import text_files

MOST_SHARED = 0.2
"""Largest share of a document's distinctive lines that may also be in held-out documents."""
DISTINCTIVE = 30
"""Fewest characters of a distinctive line, which is hardly written twice by chance."""

Document = tuple[PurePath, str]
"""The path of a document inside its folder, and its text."""


@dataclasses.dataclass(frozen=True)
class Selection:
    """The rules by which files of a folder are documents."""

    pattern: str = "*.py"
    without: tuple[str, ...] = ("site-packages", "encodings", "pydoc_data", "data", "__pycache__")
    """Names of folders that are left out at any depth: tables, and code of other projects."""
    smallest: int = 200
    """Fewest bytes of a file."""
    largest: int = 150_000
    """Most bytes of a file; longer files are mostly tables."""
    most_repeated: float = 0.5
    """Largest share of a document's distinctive lines that may be in documents before it."""


def collect(folders: Iterable[Path], selection: Selection) -> list[Document]:
    """The documents of all folders.

    A document that mostly repeats those before it, for example an older version, is left out.
    """
    documents: list[Document] = []
    seen: set[str] = set()
    for folder in folders:
        for path in text_files([folder], selection.pattern):
            inside = path.relative_to(folder)
            text = selected_text(path, inside, selection)
            if text is not None and not repeats(text, seen, selection.most_repeated):
                seen |= distinctive_lines(text)
                documents.append((inside, text))
    if not documents:
        raise LoadError("no text left in the folders given; expected files of UTF-8 text")
    return documents


def selected_text(path: Path, inside: PurePath, selection: Selection) -> str | None:
    """The text of a file, or None if it is not selected.

    Files in other encodings are left out: some libraries have such files for their tests.
    """
    content = path.read_bytes()
    fits = selection.smallest <= len(content) <= selection.largest
    if not fits or set(inside.parts) & set(selection.without):
        return None
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return None


def divide(
    documents: Sequence[Document], held_out: set[str]
) -> tuple[list[Document], list[Document]]:
    """Documents to train on, and those whose path inside their folder is held out.

    A document that repeats held-out ones, for example an older version under another name, is in
    neither part.
    """
    unseen = [d for d in documents if d[0].as_posix() in held_out]
    hidden = {line for _, text in unseen for line in distinctive_lines(text)}
    kept = [
        (path, text)
        for path, text in documents
        if path.as_posix() not in held_out and not repeats(text, hidden, MOST_SHARED)
    ]
    return kept, unseen


def set_aside(
    documents: Sequence[Document], share: float, seed: int
) -> tuple[list[Document], list[Document]]:
    """Divides documents at random: returns those that are kept, and those that are set aside."""
    chosen = np.random.default_rng(seed).permutation(len(documents))
    aside = set(chosen[: round(share * len(documents))].tolist())
    kept = [document for i, document in enumerate(documents) if i not in aside]
    return kept, [documents[i] for i in sorted(aside)]


def repeats(text: str, others: set[str], most: float) -> bool:
    """Whether the share of the text's distinctive lines that are in `others` exceeds `most`."""
    lines = distinctive_lines(text)
    return len(lines & others) > most * max(len(lines), 1)


def distinctive_lines(text: str) -> set[str]:
    return {line.strip() for line in text.splitlines() if len(line.strip()) >= DISTINCTIVE}


def sequences_of_corpus(
    documents: Sequence[Document],
    tokenizer: tokenizers.Tokenizer,
    end_token: int,
    length: int,
    seed: int,
) -> Sequences:
    """Documents in a random order, each with an end token, cut into sequences at any point."""
    return sequences_of_stream(stream_of_corpus(documents, tokenizer, end_token, seed), length)


def windows_of_corpus(
    documents: Sequence[Document],
    tokenizer: tokenizers.Tokenizer,
    end_token: int,
    length: int,
    count: int,
    seed: int,
) -> Sequences:
    """`count` sequences from random positions, which may overlap."""
    stream = stream_of_corpus(documents, tokenizer, end_token, seed)
    last = len(sequences_of_stream(stream, length).tokens) * length - length
    starts = np.random.default_rng(seed).integers(0, last + 1, count)
    return Sequences(stream[starts[:, None] + np.arange(length)], np.zeros(count, np.int32))


def stream_of_corpus(
    documents: Sequence[Document], tokenizer: tokenizers.Tokenizer, end_token: int, seed: int
) -> Int[np.ndarray, " tokens"]:
    order = np.random.default_rng(seed).permutation(len(documents))
    texts = [documents[i][1] for i in order]
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    return np.concatenate([np.array([*one.ids, end_token], np.int32) for one in encoded])
