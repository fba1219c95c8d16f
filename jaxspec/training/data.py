"""Makes sequences of tokens from text files, and the order in which a run uses them."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from jaxspec.errors import LoadError


@dataclasses.dataclass(frozen=True)
class Sequences:
    """Sequences of one length, in host memory."""

    tokens: Int[np.ndarray, "sequences length"]
    first: Int[np.ndarray, " sequences"]
    """Position from which on each sequence is learned; the tokens before it are only context."""
    features: Float[np.ndarray, "sequences length features"] | None = None
    """The target's features of the tokens, if they are kept on disk."""
    labels: Int[np.ndarray, "sequences length"] | None = None
    """The token that should be drafted at every position; goes with `features`."""

    def batch_of_step(self, step: int, batch_size: int, seed: int) -> "Sequences":
        """The batch of a step. It depends on the step alone, so resuming needs no other state.

        Every epoch has its own random order; a batch may reach from one epoch into the next.
        """
        count = len(self.tokens)
        numbers = np.arange(step * batch_size, (step + 1) * batch_size)
        epochs, within = np.divmod(numbers, count)
        order = {epoch: order_of_epoch(count, seed, int(epoch)) for epoch in np.unique(epochs)}
        return self.take(np.array([order[epoch][i] for epoch, i in zip(epochs, within)]))

    def take(self, indices: Int[np.ndarray, " batch"]) -> "Sequences":
        return Sequences(
            self.tokens[indices].astype(np.int32),
            self.first[indices].astype(np.int32),
            None if self.features is None else self.features[indices],
            None if self.labels is None else self.labels[indices],
        )

    def save(self, path: Path) -> None:
        np.savez(path, tokens=self.tokens, first=self.first)


@functools.lru_cache(maxsize=2)  # a batch may reach from one epoch into the next
def order_of_epoch(count: int, seed: int, epoch: int) -> Int[np.ndarray, " {count}"]:
    return np.random.default_rng([seed, epoch]).permutation(count)


def joined(*parts: Sequences) -> Sequences:
    """Joins parts whose sequences have the same length and no features."""
    tokens = np.concatenate([part.tokens for part in parts])
    return Sequences(tokens, np.concatenate([part.first for part in parts]))


def load_sequences(path: Path) -> Sequences:
    with np.load(path) as saved:
        return Sequences(saved["tokens"], saved["first"])


def text_files(paths: Iterable[Path], pattern: str = "*") -> list[Path]:
    """The files among the paths, and every matching file below the folders, in a fixed order."""
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise LoadError(f"no file or folder {path}; expected text to train on")
        below = [p for p in path.rglob(pattern) if p.is_file()] if path.is_dir() else [path]
        if not below:
            raise LoadError(f"no file named {pattern} below {path}; expected text to train on")
        files += sorted(below)
    return files


def read_document(path: Path) -> str:
    """The text of one file; raises a LoadError that names the file if it cannot be used."""
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise LoadError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise LoadError(
            f"{path} is not UTF-8 (byte {error.start} is {error.object[error.start]:#04x}); "
            "convert it or leave it out"
        ) from error
    if not text.strip():
        raise LoadError(f"{path} is empty; expected text to train on")
    return text


def sequences_of_documents(
    documents: Sequence[tuple[Path, str]],
    encode: Callable[[str], list[int]],
    end_token: int | None,
    length: int,
    block_size: int,
) -> Sequences:
    """Concatenates all documents and cuts them into sequences; the remainder is dropped."""
    stream: list[int] = []
    for path, text in documents:
        ids = encode(text)
        if len(ids) <= block_size:
            raise LoadError(
                f"{path} has {len(ids)} tokens, expected more than a block ({block_size}); "
                "join it with another file or leave it out"
            )
        stream += ids if end_token is None else [*ids, end_token]
    return sequences_of_stream(np.array(stream, np.int32), length)


def sequences_of_stream(stream: Int[np.ndarray, " tokens"], length: int) -> Sequences:
    if len(stream) < length:
        raise LoadError(
            f"the data has {len(stream)} tokens, expected at least one sequence of {length}; "
            "give more text or a smaller --length"
        )
    tokens = stream[: len(stream) // length * length].reshape(-1, length)
    return Sequences(tokens, np.zeros(len(tokens), np.int32))
