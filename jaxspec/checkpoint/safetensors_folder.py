"""Finds the place of each tensor in a folder of safetensors files, without reading the tensors.

Pickle files are never opened.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import jax.numpy as jnp
import numpy as np
import safetensors

from jaxspec.checkpoint.entries import read_entries
from jaxspec.errors import LoadError, one_line, shown

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
NUMPY_DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(jnp.bfloat16),
    "F16": np.dtype(np.float16),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "BOOL": np.dtype(np.bool_),
}
"""The dtypes that can be read, by their names in safetensors files."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as stored in a file: row-major, little-endian."""

    path: Path
    offset: int
    """Position of its first byte in the file."""
    shape: tuple[int, ...]
    dtype: str
    """Its name in safetensors files, for example `BF16`."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * NUMPY_DTYPES[self.dtype].itemsize


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the folder by its name, without the prefix `model.` that some layouts use."""
    index = folder / INDEX
    if (folder / SINGLE).exists():
        named = _read_header(folder / SINGLE)
    elif index.exists():
        named = _sharded(folder, index)
    else:
        named = _read_header(_only_file(folder))
    return without_prefixes(named, ("model.",), str(folder))


def _only_file(folder: Path) -> Path:
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(path.name for path in files[:3])
        raise LoadError(
            f"{folder} holds {len(files)} safetensors files ({names}) and no index, "
            f"expected {INDEX}; download it too"
        )
    pickled = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    has_pickle = f"only pickled weights ({pickled[0]}), never opened" if pickled else "no weights"
    raise LoadError(f"{folder} holds {has_pickle}, expected {SINGLE}; convert or download it")


def _sharded(folder: Path, index: Path) -> dict[str, StoredTensor]:
    file_of = read_entries(index).within("weight_map").values
    if not file_of or not all(isinstance(name, str) for name in file_of.values()):
        raise LoadError(f"{index}: no weight_map of tensor to file; download it again")
    tensors: dict[str, StoredTensor] = {}
    for name in sorted(set(file_of.values())):
        shard = _read_header(_shard(folder, index, name))
        twice = tensors.keys() & shard.keys()
        if twice:
            raise LoadError(f"{index}: two shards hold {min(twice)}; download them again")
        missing = [
            tensor for tensor, file in file_of.items() if file == name and tensor not in shard
        ]
        if missing:
            raise LoadError(
                f"{folder / name} does not hold {missing[0]}, as {INDEX} lists it; "
                "download both again"
            )
        tensors |= shard
    return tensors


def _shard(folder: Path, index: Path, name: str) -> Path:
    """The file that an index names, which must be inside this checkpoint."""
    plain = PurePosixPath(name)
    path = folder / plain
    try:
        inside = not plain.is_absolute() and ".." not in plain.parts and _is_inside(path, folder)
        is_file = inside and path.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # too long, no text, or links in a circle
        raise LoadError(
            f"{index} names {shown(name)}, which cannot be the name of a file "
            f"({type(error).__name__}); download the index again"
        ) from error
    if not inside:
        raise LoadError(
            f"{index} names {shown(name)}, which is outside the folder; expected a file of the "
            "checkpoint: do not use this checkpoint"
        )
    if not is_file:
        raise LoadError(
            f"{index} names {shown(name)}, which is missing; download the missing shard"
        )
    return path


def _is_inside(path: Path, folder: Path) -> bool:
    """Whether a file is in the folder. In a snapshot in the hub's cache, links may also lead to the
    blobs of the same model."""
    home = folder.resolve()
    if home.parent.name == "snapshots":
        home = home.parent.parent
    return path.resolve().is_relative_to(home)


def _read_header(path: Path) -> dict[str, StoredTensor]:
    try:
        # When it opens the file, the library checks that the tensors fill it without gaps.
        with safetensors.safe_open(path, "np"):
            pass
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise LoadError(
            f"{path} is not a whole safetensors file ({one_line(error)}); download it again"
        ) from error
    header.pop("__metadata__", None)
    return {name: _stored(path, 8 + length, entry) for name, entry in header.items()}


def _stored(path: Path, data_start: int, entry: dict) -> StoredTensor:
    begin, _ = entry["data_offsets"]
    return StoredTensor(path, data_start + begin, tuple(entry["shape"]), entry["dtype"])


def without_prefixes(
    named: dict[str, StoredTensor], prefixes: Sequence[str], where: str
) -> dict[str, StoredTensor]:
    """The tensors by their names, each without the first of these prefixes that it has."""
    plain: dict[str, str] = {}
    for name in sorted(named, key=len):
        prefix = next(filter(name.startswith, prefixes), "")
        short = name.removeprefix(prefix)
        if short in plain:
            raise LoadError(f"{where} holds both {plain[short]} and {name}; remove one")
        plain[short] = name
    return {short: named[name] for short, name in plain.items()}
