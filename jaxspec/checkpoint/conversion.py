"""Converts any checkpoint folder that can be opened to one in Orbax's format."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
from jax.typing import DTypeLike

from jaxspec.checkpoint.drafter_config import is_drafter
from jaxspec.checkpoint.entries import read_entries
from jaxspec.checkpoint.fp8_config import ENTRY as FP8_ENTRY
from jaxspec.checkpoint.fp8_config import KEY as FP8_KEY
from jaxspec.checkpoint.fp8_config import Quantization
from jaxspec.checkpoint.load import Checkpoint, open_drafter, open_target
from jaxspec.checkpoint.orbax_folder import save
from jaxspec.checkpoint.stream import in_total
from jaxspec.errors import JaxspecError, LoadError, UsageError, one_line, shown
from jaxspec.models.config import DrafterConfig, TargetConfig
from jaxspec.text.tokenizer_files import TOKENIZER_FILES

COPIED_FILES = ("generation_config.json", *TOKENIZER_FILES)


def convert(
    source: Path,
    destination: Path,
    dtype: DTypeLike | None = None,
    progress: Callable[[int, int], None] | None = None,
    quantization: Quantization = None,
) -> str:
    """Writes `destination`, whole or not at all, and returns a description of what it wrote.

    Without a dtype and a quantization no weight is rounded; 8-bit weights stay as they are in any
    case. `progress` is called with the bytes read so far and their total; writing takes about as
    long as reading.
    """
    with _writing_to(destination):
        _check_free(destination)
    checkpoint = _open(source, quantization)
    dtype = checkpoint.exact_dtype if dtype is None else dtype
    with _writing_to(destination):
        destination.mkdir(parents=True, exist_ok=True)
    try:
        params = checkpoint.load(dtype, in_total(progress, checkpoint.num_bytes))
        with _writing_to(destination):
            save(destination, params)
            _copy_files(source, destination)
            # Written last: a folder without a config does not open, so a half-written one is not
            # used.
            _write_config(source, checkpoint.config, destination)
    except BaseException:
        shutil.rmtree(destination, ignore_errors=True)
        raise
    is_draft = isinstance(checkpoint.config, DrafterConfig)
    kind = "drafter" if is_draft else "target"
    also = "" if is_draft or checkpoint.config.decoder.fp8 is None else " and FP8"
    count = len(jax.tree.leaves(params))
    return f"{kind}, {count} parameters, weights in {jax.numpy.dtype(dtype)}{also}"


@contextmanager
def _writing_to(destination: Path) -> Iterator[None]:
    """Says in one line why the folder cannot be written."""
    try:
        yield
    except (JaxspecError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:  # Orbax raises nothing more precise
        raise LoadError(
            f"{shown(str(destination))} cannot be written ({one_line(error)}); expected a "
            "folder that can be made, with enough space"
        ) from error


def _check_free(destination: Path) -> None:
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise UsageError(
            f"{destination} exists already, expected an empty folder or none; remove it or "
            "choose another"
        )


def _open(
    source: Path, quantization: Quantization
) -> Checkpoint[TargetConfig] | Checkpoint[DrafterConfig]:
    if not is_drafter(read_entries(source / "config.json")):
        return open_target(source, quantization)
    if quantization is not None:
        raise UsageError(
            f"{source} is a drafter, expected a target, whose layers can be quantised; leave out "
            "--quantization"
        )
    return open_drafter(source)


def _copy_files(source: Path, destination: Path) -> None:
    for pattern in COPIED_FILES:
        for path in source.glob(pattern):
            copy = destination / path.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)


def _write_config(source: Path, config: TargetConfig | DrafterConfig, destination: Path) -> None:
    """Copies the source's config. A relative path to the target becomes absolute. If weights were
    quantised here, an entry is added that says how they are scaled."""
    entries = dict(read_entries(source / "config.json").values)
    in_8_bits = isinstance(config, TargetConfig) and config.decoder.fp8 is not None
    if in_8_bits and entries.get(FP8_KEY) is None:
        entries[FP8_KEY] = FP8_ENTRY
    if isinstance(config, DrafterConfig) and config.target_path:
        entries["speculators_config"]["verifier"]["name_or_path"] = config.target_path
    (destination / "config.json").write_text(json.dumps(entries, indent=2) + "\n")
