"""The tensors that the 8-bit matrices of a target's or a drafter's layers are made of.

ours                      Hugging Face's
attention/qkv/weight  =  [q_proj.weight; k_proj.weight; v_proj.weight]
attention/qkv/scales  =  [q_proj.weight_scale_inv; k_proj.weight_scale_inv; v_proj.weight_scale_inv]

A matrix stays [outputs, inputs], so parts that are joined along outputs bring their own scales.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp

from jaxspec.checkpoint.fp8_config import OF_DRAFTER, Fp8Layout, check_whole_blocks
from jaxspec.checkpoint.names import E4M3, Shape, Source
from jaxspec.checkpoint.orbax_folder import is_orbax
from jaxspec.checkpoint.safetensors_folder import NUMPY_DTYPES, StoredTensor
from jaxspec.errors import LoadError, UsageError
from jaxspec.layers.decoder import Decoder
from jaxspec.layers.fp8 import Fp8
from jaxspec.models.config import DFlashConfig, DrafterConfig, Qwen3Config
from pallas_kernels.fp8_product import BLOCK

SCALES_OF_INPUTS = ("input_scale", "activation_scale", "input_zero_point")
"""Endings of the names of tensors that belong to activations with fixed scales."""
MATRICES = ("attention/qkv", "attention/out", "mlp/gate_up", "mlp/down")
"""The matrices of a layer that can be in 8 bits. Those of convolutions cannot."""
NUMBER: tuple[Shape, ...] = ((), (1,))
"""The shapes of a single number."""


def fp8_sources(
    sources: dict[str, Source], layout: Fp8Layout, stored: Mapping[str, StoredTensor] | None = None
) -> dict[str, Source]:
    """The sources of a target's parameters, with the layers' matrices in 8 bits."""
    found: dict[str, Source] = {}
    for path, source in sources.items():
        if not is_layer_matrix(path):
            found[path] = source
            continue
        prefix = path.removesuffix("kernel")
        found[f"{prefix}weight"] = Source(
            source.tensors, dtypes=(E4M3,), kept_as=NUMPY_DTYPES[E4M3]
        )
        found[f"{prefix}scales"] = _scales(source, layout, stored or {})
    return found


def is_layer_matrix(path: str) -> bool:
    layer, _, of_layer = path.partition("/")
    return layer.startswith("layers_") and of_layer.removesuffix("/kernel") in MATRICES


def _scales(source: Source, layout: Fp8Layout, stored: Mapping[str, StoredTensor]) -> Source:
    shapes, spread = {}, []
    for name, (outputs, inputs) in source.tensors.items():
        scale = f"{name.removesuffix('weight')}{layout.scale}"
        if layout.scaled == "block":
            shapes[scale] = -(-outputs // BLOCK), -(-inputs // BLOCK)
        elif layout.scaled == "channel":
            shapes[scale] = outputs, 1
        else:
            of_file = stored[scale].shape if scale in stored else (1,)
            shapes[scale] = of_file if of_file in NUMBER else (1,)
            spread.append(outputs)
    return Source(shapes, kept_as=jnp.dtype(jnp.float32), spread=tuple(spread))


def check_fp8(sources: dict[str, Source], stored: Mapping[str, StoredTensor], where: str) -> None:
    """Refuses tensors that would be read wrongly, with more precise errors than `check_tensors`."""
    for name in sorted(stored):
        if name.endswith(SCALES_OF_INPUTS):
            raise LoadError(
                f"{where} holds {name}, a fixed scale of activations, which is not implemented; "
                "use a checkpoint with dynamic activations"
            )
    for weight in _weights(sources):
        if weight in stored and stored[weight].dtype != E4M3:
            raise LoadError(
                f"{where}: {weight} is {stored[weight].dtype}, expected {E4M3}: all projections of "
                "all layers or none; use a checkpoint that leaves none of them out"
            )


def _weights(sources: dict[str, Source]) -> Iterator[str]:
    for source in sources.values():
        if E4M3 in source.dtypes:
            yield from source.tensors


def quantised_target(
    config: Qwen3Config, sources: dict[str, Source], folder: Path
) -> tuple[Qwen3Config, dict[str, Source]]:
    """The config and the sources of a target whose matrices are quantised while they are read."""
    if is_orbax(folder):
        raise UsageError(
            f"{folder} was written by jaxspec convert, and quantization is for Hugging Face's "
            "layout; convert the source with --quantization fp8, or leave quantization out"
        )
    check_whole_blocks(config.decoder, str(folder))
    return replace(config, decoder=_in_blocks(config.decoder)), quantised_sources(sources)


def quantised_drafter(config: DrafterConfig, where: str) -> DFlashConfig:
    """The config of a drafter whose matrices are in 8 bits. Drafters that cannot be are refused."""
    if not isinstance(config, DFlashConfig):
        raise UsageError(
            f"{OF_DRAFTER} is 'fp8', but {where} is a drafter of the kind {config.kind!r}; "
            f"expected a DFlash, DFlash2 or DSpark drafter; leave {OF_DRAFTER} out"
        )
    check_whole_blocks(config.decoder, where, f"leave {OF_DRAFTER} out")
    return replace(config, decoder=_in_blocks(config.decoder))


def refuse_converted_drafter(folder: Path) -> None:
    """Refuses a drafter in Orbax's layout, whose arrays cannot be quantised while they are read."""
    if is_orbax(folder):
        raise UsageError(
            f"{folder} was written by jaxspec convert, and {OF_DRAFTER} is for the layouts that "
            "drafters are published in; name the folder that it was made from, or leave "
            f"{OF_DRAFTER} out"
        )


def quantised_sources(sources: dict[str, Source]) -> dict[str, Source]:
    """The same sources, with the layers' matrices quantised while they are read."""
    quantised: dict[str, Source] = {}
    for path, source in sources.items():
        if is_layer_matrix(path):
            both = replace(source, transposed=False, quantised=True)
            quantised[path.removesuffix("/kernel")] = both
        else:
            quantised[path] = source
    return quantised


def _in_blocks(decoder: Decoder) -> Decoder:
    return replace(decoder, fp8=Fp8(blocks=True))
