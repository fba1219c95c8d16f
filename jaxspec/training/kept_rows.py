"""Sequences that are computed once and kept on disk, with a hash of what they were made from."""

import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from jaxspec.errors import LoadError, one_line
from jaxspec.training.data import Sequences, check_ids
from jaxspec.training.notices import notice
from jaxspec.training.whole_files import written_whole


class Unusable(Exception):
    """A kept file cannot be used. The message continues a sentence that begins with its path."""


def kept_sequences(
    path: Path,
    made_of: str,
    shape: tuple[int, int],
    num_ids: int,
    make: Callable[[], Sequences],
) -> Sequences:
    """The sequences that `path` holds. They are made and saved first if the file is missing, is
    damaged, or was made from something else."""
    if path.exists():
        try:
            return load_sequences(path, made_of, shape, num_ids)
        except Unusable as error:
            notice(f"{path} {error}; its sequences are computed again")
    made = make()
    save_arrays(path, made_of, tokens=made.tokens, first=made.first)
    return made


def load_sequences(path: Path, made_of: str, shape: tuple[int, int], num_ids: int) -> Sequences:
    tokens, first = load_arrays(path, made_of, {"tokens": shape, "first": shape[:1]})
    check_kept_ids(tokens, num_ids)
    if np.any((first < 0) | (first >= shape[1])):
        raise Unusable("is damaged (a first position outside its sequence)")
    return Sequences(tokens, first)


def save_arrays(path: Path, made_of: str, **arrays: np.ndarray) -> None:
    with written_whole(path) as unfinished, unfinished.open("wb") as file:
        np.savez(file, allow_pickle=False, made_of=np.array(made_of), **arrays)


def load_arrays(
    path: Path, made_of: str, shapes: dict[str, tuple[int, ...]]
) -> tuple[np.ndarray, ...]:
    """The arrays of integers that `save_arrays` wrote, or an Unusable that says what is wrong.

    A zip file holds a checksum of every array, so that any damage is noticed.
    """
    arrays = read_arrays(path)
    kept = str(arrays.get("made_of"))
    for name, shape in shapes.items():
        found = arrays.get(name)
        if found is None or found.shape != shape or found.dtype.kind != "i":
            what = "missing" if found is None else f"{found.dtype} of shape {found.shape}"
            raise Unusable(f"is damaged or of other data ({name} is {what}, expected {shape})")
    if kept != made_of:
        raise Unusable("was made from other data or with other options")
    return tuple(arrays[name] for name in shapes)


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        with path.open("rb") as file:
            if not zipfile.is_zipfile(file):
                raise Unusable("is damaged (not a whole npz file)")
            with np.load(file) as saved:
                return dict(saved)
    except OSError as error:
        raise LoadError(f"cannot read {path}: {one_line(error)}; remove it") from error
    except (Unusable, MemoryError):
        raise
    except Exception as error:  # zipfile, zlib and numpy raise a dozen kinds for damage
        raise Unusable(f"is damaged ({one_line(error)[:100]})") from error


def check_kept_ids(ids: np.ndarray, num_ids: int) -> None:
    try:
        check_ids(ids, num_ids, "a sequence")
    except LoadError as error:
        raise Unusable(f"is damaged (a token id outside the {num_ids} of the target)") from error
