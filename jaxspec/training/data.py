"""Text files to rows of tokens, and the order in which a run sees them."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from jaxspec.errors import LoadError
from jaxspec.training.objective import Batch


@dataclasses.dataclass(frozen=True)
class Rows:
    """Sequences of one length."""

    tokens: Int[np.ndarray, "rows length"]
    first: Int[np.ndarray, " rows"]
    """Where the part to learn from begins in each."""
    features: Float[np.ndarray, "rows length features"] | None = None
    """What the target made of them, where that is kept."""
    labels: Int[np.ndarray, "rows length"] | None = None
    """What should be drafted at every position; goes with `features`."""

    def batch_of_step(self, step: int, batch_size: int, seed: int) -> Batch:
        """A function of the step alone: resuming needs no state. Every epoch has its own order."""
        places = np.arange(step * batch_size, (step + 1) * batch_size)
        epochs, within = np.divmod(places, len(self.tokens))
        count = len(self.tokens)
        order = {epoch: order_of_epoch(count, seed, int(epoch)) for epoch in np.unique(epochs)}
        picked = np.array([order[epoch][place] for epoch, place in zip(epochs, within)])
        return self.batch(picked)

    def batch(self, picked: Int[np.ndarray, " batch"]) -> Batch:
        tokens, first = self.tokens[picked].astype(np.int32), self.first[picked].astype(np.int32)
        if self.features is None:
            return Batch(tokens, first)
        return Batch(tokens, first, self.features[picked], self.labels[picked])

    def save(self, path: Path) -> None:
        np.savez(path, tokens=self.tokens, first=self.first)


@functools.lru_cache(maxsize=2)  # a step asks for one epoch, at times for the next one too
def order_of_epoch(count: int, seed: int, epoch: int) -> Int[np.ndarray, " {count}"]:
    return np.random.default_rng([seed, epoch]).permutation(count)


def joined(*parts: Rows) -> Rows:
    """Of one length each, without features."""
    tokens = np.concatenate([part.tokens for part in parts])
    return Rows(tokens, np.concatenate([part.first for part in parts]))


def load_rows(path: Path) -> Rows:
    with np.load(path) as saved:
        return Rows(saved["tokens"], saved["first"])


def text_files(places: Iterable[Path], pattern: str = "*") -> list[Path]:
    """Files as given, and every matching file below the folders given, in a fixed order."""
    found: list[Path] = []
    for place in places:
        if not place.exists():
            raise LoadError(f"no file or folder {place}; expected text to train on")
        below = [p for p in place.rglob(pattern) if p.is_file()] if place.is_dir() else [place]
        if not below:
            raise LoadError(f"nothing named {pattern} below {place}; expected text to train on")
        found += sorted(below)
    return found


def read_document(path: Path) -> str:
    """One text file; anything that cannot be trained on is a LoadError that names it."""
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


def rows_of_documents(
    documents: Sequence[tuple[Path, str]],
    encode: Callable[[str], list[int]],
    end_token: int | None,
    length: int,
    block_size: int,
) -> Rows:
    """All documents one after the other, cut into rows; what is left over at the end is dropped."""
    stream: list[int] = []
    for path, text in documents:
        ids = encode(text)
        if len(ids) <= block_size:
            raise LoadError(
                f"{path} has {len(ids)} tokens, expected more than a block ({block_size}); "
                "join it with another file or leave it out"
            )
        stream += ids if end_token is None else [*ids, end_token]
    return rows_of_stream(np.array(stream, np.int32), length)


def rows_of_stream(stream: Int[np.ndarray, " tokens"], length: int) -> Rows:
    if len(stream) < length:
        raise LoadError(
            f"the data has {len(stream)} tokens, expected at least one sequence of {length}; "
            "give more text or a smaller --length"
        )
    rows = stream[: len(stream) // length * length].reshape(-1, length)
    return Rows(rows, np.zeros(len(rows), np.int32))
