"""Opens a target or a drafter from a folder, and loads its weights onto the device.

Opening reads configs and headers only, and finds everything that can be wrong; loading reads the
weights.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Int

from jaxspec.checkpoint.draft_config import read_draft_config
from jaxspec.checkpoint.names import check_tensors, drafter_sources, target_sources
from jaxspec.checkpoint.pair import check_pair
from jaxspec.checkpoint.safetensors_folder import StoredTensor, stored_tensors
from jaxspec.checkpoint.stream import read_tensor, stream_parameters
from jaxspec.checkpoint.target_config import read_target_config
from jaxspec.errors import LoadError
from jaxspec.models.config import DFlashConfig, Qwen3Config
from jaxspec.models.parameters import Params

MASK_EMBEDDING = "mask_embedding.pt"


@dataclass(frozen=True)
class OpenTarget:
    """A target whose files have been found in order."""

    config: Qwen3Config
    load: Callable[[DTypeLike], Params]
    """Reads the weights onto the device."""


@dataclass(frozen=True)
class OpenDrafter:
    """A drafter whose files have been found in order."""

    config: DFlashConfig
    load: Callable[[DTypeLike], Params]
    """Reads the weights onto the device."""


def load_target(folder: str | Path, dtype: DTypeLike) -> tuple[Qwen3Config, Params]:
    target = open_target(folder)
    return target.config, target.load(dtype)


def load_drafter(
    folder: str | Path,
    target: Qwen3Config | None,
    dtype: DTypeLike,
    block_size: int | None = None,
) -> tuple[DFlashConfig, Params]:
    """`target` is checked against; None leaves the pair unchecked."""
    drafter = open_drafter(folder, block_size)
    if target is not None:
        check_pair(target, drafter.config)
    return drafter.config, drafter.load(dtype)


def load_pair(
    target_folder: str | Path,
    drafter_folder: str | Path,
    dtype: DTypeLike,
    block_size: int | None = None,
) -> tuple[Qwen3Config, Params, DFlashConfig, Params]:
    """Both, after everything about both was checked."""
    target, drafter = open_target(target_folder), open_drafter(drafter_folder, block_size)
    check_pair(target.config, drafter.config)
    return target.config, target.load(dtype), drafter.config, drafter.load(dtype)


def open_target(folder: str | Path) -> OpenTarget:
    folder = Path(folder)
    config = read_target_config(folder)
    stored = stored_tensors(folder)
    sources = target_sources(config)
    tied_head = ("lm_head.weight",) if config.tie_word_embeddings else ()
    check_tensors(sources, stored, str(folder), unused=tied_head)
    return OpenTarget(config, lambda dtype: stream_parameters(sources, stored, dtype))


def open_drafter(folder: str | Path, block_size: int | None = None) -> OpenDrafter:
    folder = Path(folder)
    config = read_draft_config(folder, block_size)
    if (folder / MASK_EMBEDDING).exists():
        raise LoadError(
            f"{folder} holds {MASK_EMBEDDING}, a mask embedding of its own, which is not "
            "implemented; use a drafter whose mask is a row of the target's embedding"
        )
    stored = stored_tensors(folder)
    config = _with_what_it_owns(config, stored)
    sources = drafter_sources(config)
    check_tensors(sources, stored, str(folder), unused=("t2d",))
    target_ids = _target_ids(config, stored, folder)
    if target_ids is not None:
        sources.pop("target_ids")

    def load(dtype: DTypeLike) -> Params:
        params = stream_parameters(sources, stored, dtype)
        return params if target_ids is None else {**params, "target_ids": jnp.asarray(target_ids)}

    return OpenDrafter(config, load)


def _with_what_it_owns(config: DFlashConfig, stored: dict[str, StoredTensor]) -> DFlashConfig:
    """A reduced vocabulary has a head of its own; else the tensors that are there decide."""
    reduced = config.draft_vocab_size or (config.vocab_size if "d2t" in stored else None)
    return replace(
        config,
        draft_vocab_size=reduced,
        owns_embedding="embed_tokens.weight" in stored,
        owns_head="lm_head.weight" in stored or reduced is not None,
    )


def _target_ids(
    config: DFlashConfig, stored: dict[str, StoredTensor], folder: Path
) -> Int[np.ndarray, " draft_vocab"] | None:
    """Absolute ids, from the offsets that are stored; small enough to check before the weights."""
    if config.draft_vocab_size is None:
        return None
    offsets = read_tensor(stored["d2t"]).astype(np.int64)
    ids = np.arange(len(offsets)) + offsets
    _check_target_ids(ids, config.vocab_size, folder)
    if "t2d" in stored:
        _check_kept(ids, stored["t2d"], config.vocab_size, folder)
    return ids.astype(np.int32)


def _check_target_ids(ids: Int[np.ndarray, " draft_vocab"], vocab_size: int, folder: Path) -> None:
    if ids.min() < 0 or ids.max() >= vocab_size or len(np.unique(ids)) != len(ids):
        raise LoadError(
            f"{folder}: d2t leads to ids {ids.min()} to {ids.max()}, expected offsets to distinct "
            f"ids below {vocab_size}; use an undamaged checkpoint"
        )


def _check_kept(
    ids: Int[np.ndarray, " draft_vocab"], stored: StoredTensor, vocab_size: int, folder: Path
) -> None:
    if stored.shape != (vocab_size,) or stored.dtype != "BOOL":
        raise LoadError(
            f"{folder}: t2d is not one flag per target id, of which there are "
            f"{vocab_size}; use an undamaged checkpoint"
        )
    if not np.array_equal(np.flatnonzero(read_tensor(stored)), np.sort(ids)):
        raise LoadError(
            f"{folder}: t2d and d2t keep different ids, expected the same; use an undamaged "
            "checkpoint"
        )
