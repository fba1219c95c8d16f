"""Hashes of what a run learns from, so that a resumed run notices if any of it has changed.

They depend only on contents: moving or copying the files does not change them.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.text.tokenizer import Tokenizer

WHOLE = 16 << 20
"""Files up to this many bytes are hashed whole; of larger files, this many bytes in samples."""
SAMPLES = 256


def hash_of_text(texts: Iterable[str]) -> str:
    return _hash_of(text.encode() for text in texts)


def hash_of_tokenizer(tokenizer: Tokenizer) -> str:
    """A hash of everything that turns text into ids, and of the ids of the special tokens."""
    special = json.dumps(dict(tokenizer.special_tokens), sort_keys=True)
    return _hash_of([tokenizer.backend.to_str().encode(), special.encode()])


def hash_of_weights(folder: Path) -> str:
    """A hash of the config and of sizes and samples of the weights, for a folder in either layout.

    Reading a large model whole would take minutes. Training changes nearly every number of a
    checkpoint, and its header holds every shape, so samples tell two models apart.
    """
    configs = [folder / "config.json", folder / "generation_config.json"]
    weights = [*folder.glob("*.safetensors"), *folder.glob("params/**/*")]
    files = [path for path in (*configs, *sorted(weights)) if path.is_file()]
    return _hash_of(piece for path in files for piece in _pieces(path, folder))


def hash_of_arrays(*arrays: np.ndarray) -> str:
    def pieces(x: np.ndarray) -> tuple[bytes, memoryview]:
        flat = np.ascontiguousarray(x).reshape(-1)
        return str((x.shape, x.dtype)).encode(), flat.view(np.uint8).data

    return _hash_of(piece for x in arrays for piece in pieces(x))


def hash_of_json(value: Any) -> str:
    return _hash_of([json.dumps(value, sort_keys=True).encode()])


def _pieces(path: Path, folder: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    yield path.relative_to(folder).as_posix().encode()
    yield str(size).encode()
    with path.open("rb") as file:
        if size <= WHOLE:
            yield file.read()
            return
        length = WHOLE // SAMPLES
        for sample in range(SAMPLES):
            # The first sample begins at the first byte, and the last one ends at the last byte.
            file.seek(sample * (size - length) // (SAMPLES - 1))
            yield file.read(length)


def _hash_of(pieces: Iterable[bytes | memoryview]) -> str:
    """The lengths are hashed too, so that a cut between two pieces cannot move unnoticed."""
    total = hashlib.sha256()
    for piece in pieces:
        total.update(len(piece).to_bytes(8, "little"))
        total.update(piece)
    return total.hexdigest()
