"""Finds and reads the text files of a run."""

import codecs
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from jaxspec.errors import LoadError

PIECE = 1 << 20
"""Bytes that are read at once. If a large file is not text, its first piece shows that."""


class Document(NamedTuple):
    """A text to train on."""

    path: Path
    text: str
    named: bool
    """Whether the user named this file itself. If it cannot be used, that is an error; a file that
    was only found in a folder is left out instead."""


class LeftOut(NamedTuple):
    """A file that was found in a folder and is not trained on."""

    path: Path
    reason: str
    """What the file is, such as `empty`."""


class Unfit(Exception):
    """A file cannot be used as text."""

    def __init__(self, reason: str, details: str = "") -> None:
        super().__init__(f"{reason}{details}")
        self.reason = reason


def text_files(paths: Iterable[Path], pattern: str = "*") -> list[Path]:
    """The files among the paths, and every matching file below the folders, in a fixed order."""
    return [path for path, _ in _found(paths, pattern)]


def check_paths(paths: Iterable[Path]) -> None:
    """Refuses paths that do not exist."""
    for path in paths:
        if not path.exists():
            raise LoadError(f"no file or folder {path}; expected text to train on")


def _found(paths: Iterable[Path], pattern: str) -> Iterator[tuple[Path, bool]]:
    """Every file, and whether it is itself among the paths."""
    for path in paths:
        check_paths([path])
        if not path.is_dir():
            yield path, True
            continue
        below = sorted(p for p in path.rglob(pattern) if p.is_file())
        if not below:
            raise LoadError(f"no file named {pattern} below {path}; expected text to train on")
        yield from ((p, False) for p in below)


def read_documents(paths: Iterable[Path]) -> tuple[list[Document], list[LeftOut]]:
    """The texts of all files, and the files that are not text."""
    documents: list[Document] = []
    left_out: list[LeftOut] = []
    for path, named in _found(paths, "*"):
        try:
            documents.append(Document(path, text_of_file(path), named))
        except Unfit as error:
            if named:
                raise LoadError(f"{path} is {error}; convert it or leave it out") from error
            left_out.append(LeftOut(path, error.reason))
    if not documents:
        raise LoadError(
            f"no text to train on: files that are {summary(left_out)}; expected UTF-8 text"
        )
    return documents, left_out


def text_of_file(path: Path) -> str:
    """The text of a file, or an Unfit that says why the file has none."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    pieces: list[str] = []
    start = 0
    try:
        with path.open("rb") as file:
            for piece in itertools.chain(iter(lambda: file.read(PIECE), b""), [b""]):
                start = file.tell() - len(piece) - len(decoder.getstate()[0])
                pieces.append(decoder.decode(piece, final=not piece))
    except OSError as error:
        raise LoadError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        at, byte = start + error.start, error.object[error.start]
        raise Unfit("not UTF-8", f" (byte {at} is {byte:#04x})") from error
    text = "".join(pieces)
    if not text.strip():
        raise Unfit("empty", ", expected text to train on")
    return text


def summary(left_out: list[LeftOut]) -> str:
    """For each reason, how many files are left out, and the first of them."""
    first = {one.reason: one.path for one in reversed(left_out)}
    counts = Counter(one.reason for one in left_out)
    return ", ".join(f"{counts[reason]} {reason} ({first[reason]})" for reason in counts)
