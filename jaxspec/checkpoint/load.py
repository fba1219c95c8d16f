"""Opens the folder of a target or a drafter, and loads its weights onto the device.

    target = open_target(folder)
    params = target.load(jnp.bfloat16)

Opening reads configs and headers only, and finds every mistake in them; loading reads the weights.
A folder is in Hugging Face's layout or written by `jaxspec convert`.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Int

from jaxspec.checkpoint import eagle3_names
from jaxspec.checkpoint.dflash2_config import refuse_reduced_vocabulary
from jaxspec.checkpoint.draft_refusals import refuse_tensors_of_others
from jaxspec.checkpoint.draft_vocabulary import check_ids, target_ids_of
from jaxspec.checkpoint.drafter_config import read_drafter_config
from jaxspec.checkpoint.fp8_config import Quantization, read_fp8_layout
from jaxspec.checkpoint.fp8_names import (
    check_fp8,
    fp8_sources,
    quantised_drafter,
    quantised_sources,
    quantised_target,
    refuse_converted_drafter,
)
from jaxspec.checkpoint.names import (
    Source,
    check_tensors,
    drafter_sources,
    exact_dtype,
    target_sources,
)
from jaxspec.checkpoint.orbax_folder import check_arrays, is_orbax, orbax_arrays, restore
from jaxspec.checkpoint.qwen35_names import qwen35_sources, text_tensors
from jaxspec.checkpoint.safetensors_folder import StoredTensor, stored_tensors
from jaxspec.checkpoint.stream import (
    BytesRead,
    Places,
    bytes_of,
    read_tensor,
    stream_parameters,
)
from jaxspec.checkpoint.target_config import read_target_config
from jaxspec.errors import LoadError, UsageError
from jaxspec.models.config import DFlashConfig, DrafterConfig, Qwen35Config, TargetConfig
from jaxspec.models.eagle3_config import Eagle3Config
from jaxspec.models.parameters import Params

MASK_EMBEDDING = "mask_embedding.pt"
KEPT_IDS = "t2d"


@dataclass(frozen=True)
class Checkpoint[Config]:
    """An opened checkpoint: its config and headers are checked, its weights not yet read."""

    config: Config
    exact_dtype: DTypeLike
    """The narrowest dtype that holds every stored weight without rounding."""
    load: "LoadWeights"
    """Reads the weights onto the device, in the given dtype."""
    num_bytes: int
    """Bytes of the stored weights."""


class LoadWeights(Protocol):
    def __call__(
        self,
        dtype: DTypeLike,
        progress: BytesRead | None = None,
        places: Places | None = None,
    ) -> Params:
        """The weights. `progress` is called repeatedly with the number of bytes read since the last
        call. With `places`, the weights are spread over several devices."""
        ...


def open_target(folder: str | Path, quantization: Quantization = None) -> Checkpoint[TargetConfig]:
    """Opens a target. With `quantization`, the layers' matrices become 8-bit floats if they are not
    stored as such."""
    folder = Path(folder)
    config = read_target_config(folder)
    if isinstance(config, Qwen35Config):
        return _open_qwen35(folder, config, quantization)
    layout = read_fp8_layout(folder)
    sources = target_sources(config)
    if quantization is not None and layout is None:
        config, sources = quantised_target(config, sources, folder)
    if is_orbax(folder):
        if layout is not None:
            sources = fp8_sources(sources, layout)
        return _open_orbax(folder, config, sources)
    stored = stored_tensors(folder)
    if layout is not None:
        sources = fp8_sources(sources, layout, stored)
        check_fp8(sources, stored, str(folder))
    return _checked(folder, config, sources, stored)


def _open_qwen35(
    folder: Path, config: Qwen35Config, quantization: Quantization
) -> Checkpoint[TargetConfig]:
    if quantization is not None:
        raise UsageError(
            f"quantization is {quantization!r}, which is not implemented for Qwen3.5; leave it out"
        )
    sources = qwen35_sources(config)
    if is_orbax(folder):
        return _open_orbax(folder, config, sources)
    return _checked(folder, config, sources, text_tensors(stored_tensors(folder), str(folder)))


def _checked(
    folder: Path,
    config: TargetConfig,
    sources: dict[str, Source],
    stored: dict[str, StoredTensor],
) -> Checkpoint[TargetConfig]:
    """A target, after a check that its tensors are those of its config."""
    tied_head = ("lm_head.weight",) if config.tie_word_embeddings else ()
    check_tensors(sources, stored, str(folder), unused=tied_head)
    return Checkpoint(
        config,
        exact_dtype(sources, stored),
        partial(stream_parameters, sources, stored),
        bytes_of(sources, stored),
    )


def open_drafter(
    folder: str | Path, block_size: int | None = None, quantization: Quantization = None
) -> Checkpoint[DrafterConfig]:
    """Opens a drafter. With `quantization`, the matrices of its layers become 8-bit floats."""
    folder = Path(folder)
    config = read_drafter_config(folder, block_size)
    if quantization is not None:
        refuse_converted_drafter(folder)
        config = quantised_drafter(config, str(folder))
    if is_orbax(folder):
        config = _completed(config, orbax_arrays(folder).keys(), str(folder))
        return _open_orbax(folder, config, sources_of(config))
    return _open_safetensors_drafter(folder, config)


def _open_orbax[Config](
    folder: Path, config: Config, sources: dict[str, Source]
) -> Checkpoint[Config]:
    arrays = orbax_arrays(folder)
    check_arrays(sources, arrays, str(folder))
    weights = [
        array.dtype
        for path, array in arrays.items()
        if jnp.issubdtype(array.dtype, jnp.floating) and sources[path].kept_as is None
    ]

    num_bytes = sum(array.size * array.dtype.itemsize for array in arrays.values())

    def load(
        dtype: DTypeLike, progress: BytesRead | None = None, places: Places | None = None
    ) -> Params:
        params = restore(folder, sources, arrays, dtype, places)
        if progress is not None:
            progress(num_bytes)
        if isinstance(config, DrafterConfig) and "target_ids" in params:
            check_ids(np.asarray(params["target_ids"]), config.vocab_size, str(folder))
        return params

    return Checkpoint(config, jnp.result_type(*weights), load, num_bytes)


def _open_safetensors_drafter(folder: Path, config: DrafterConfig) -> Checkpoint[DrafterConfig]:
    if (folder / MASK_EMBEDDING).exists():
        raise LoadError(
            f"{folder} holds {MASK_EMBEDDING}, a mask embedding of its own, which is not "
            "implemented; use a drafter whose mask is a row of the target's embedding"
        )
    stored = stored_tensors(folder)
    if not isinstance(config, Eagle3Config):
        refuse_tensors_of_others(stored, str(folder))
    config = _completed(config, eagle3_names.parameters_in(stored, str(folder)), str(folder))
    sources = sources_of(config, stored)
    check_tensors(sources, stored, str(folder), unused=(KEPT_IDS,))
    weights = {path: source for path, source in sources.items() if path != "target_ids"}
    target_ids = _target_ids(config, stored, str(folder))

    def load(
        dtype: DTypeLike, progress: BytesRead | None = None, places: Places | None = None
    ) -> Params:
        params = stream_parameters(weights, stored, dtype, progress, places)
        if target_ids is None:
            return params
        ids = jnp.asarray(target_ids)
        return {**params, "target_ids": places["target_ids"].placed(ids) if places else ids}

    return Checkpoint(config, exact_dtype(weights, stored), load, bytes_of(weights, stored))


def sources_of(config: DrafterConfig, stored: Collection[str] = ()) -> dict[str, Source]:
    """The tensors that each parameter of a drafter is made of, in files with these names."""
    if isinstance(config, Eagle3Config):
        return eagle3_names.eagle3_sources(config, stored)
    sources = drafter_sources(config)
    return sources if config.decoder.fp8 is None else quantised_sources(sources)


def _completed(config: DrafterConfig, parameters: Collection[str], where: str) -> DrafterConfig:
    """The config, completed from the names of the parameters that the drafter has."""
    if isinstance(config, Eagle3Config):
        return eagle3_names.completed(config, parameters)
    owned = "embedding/embedding", "head/kernel", "target_ids"
    completed = _with_ownership(config, *(path in parameters for path in owned))
    refuse_reduced_vocabulary(completed, where)
    return completed


def _with_ownership(
    config: DFlashConfig, has_embedding: bool, has_head: bool, has_target_ids: bool
) -> DFlashConfig:
    """The config, completed by whether the drafter has an embedding and a head of its own.

    A drafter with a reduced vocabulary always has its own head. Others have it if it is stored.
    """
    whole = config.vocab_size if has_target_ids else None
    reduced = config.draft_vocab_size or whole
    return replace(
        config,
        draft_vocab_size=reduced,
        owns_embedding=has_embedding,
        owns_head=has_head or reduced is not None,
    )


def _target_ids(
    config: DrafterConfig, stored: dict[str, StoredTensor], where: str
) -> Int[np.ndarray, " draft_vocab"] | None:
    """The ids of a reduced vocabulary, which are small enough to be read and checked on opening."""
    if config.draft_vocab_size is None:
        return None
    kept = None
    if KEPT_IDS in stored:
        if stored[KEPT_IDS].shape != (config.vocab_size,) or stored[KEPT_IDS].dtype != "BOOL":
            raise LoadError(
                f"{where}: {KEPT_IDS} is {stored[KEPT_IDS].dtype} {stored[KEPT_IDS].shape}, "
                f"expected BOOL ({config.vocab_size},); use an undamaged checkpoint"
            )
        kept = read_tensor(stored[KEPT_IDS])
    return target_ids_of(read_tensor(stored["d2t"]), kept, config.vocab_size, where)
