"""Splits models into shards for several devices, and refuses what cannot be split."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from jaxspec.engine.step.io import Models
from jaxspec.errors import UsageError
from jaxspec.layers.decoder import Decoder
from jaxspec.layers.shards import Shards
from jaxspec.models.drafter import DrafterModule
from jaxspec.models.sharding import Shardable, block_sides, cut_sizes
from jaxspec.models.targets import CheckpointTarget
from jaxspec.proposers.drafters import drafter_in
from pallas_kernels.fp8_product import BLOCK

OPTION = "tensor_parallel_size"
OTHERS = {"target": "weights with a scale per channel", "drafter": "a drafter in 16 bits"}
"""What can be cut if a model's FP8 weights in blocks cannot."""


def with_shards(models: Models, shards: Shards) -> Models:
    """The models of one device's shard; unchanged for one device."""
    if shards.count == 1:
        return models
    _refuse(models, shards.count)
    target = models.target
    if not isinstance(target, CheckpointTarget):
        raise UsageError(
            f"{OPTION} is {shards.count}, but the target is a {type(target).__name__}; expected a "
            "Qwen3 or Qwen35, or 1"
        )
    for name, model in _cut_models(models):
        _refuse_parts_of_blocks(name, model.config.decoder, shards.count)
    proposers = tuple(_cut(one, shards) for one in models.proposers)
    return dataclasses.replace(models, target=target.with_shards(shards), proposers=proposers)


def _refuse(models: Models, count: int) -> None:
    """Refuses more devices than there are, and sizes that their number does not divide."""
    if count > (found := jax.device_count()):
        raise UsageError(
            f"{OPTION} is {count}, but jax sees {found} {_devices(found)}; expected at most {found}"
        )
    if jax.process_count() > 1 and count != found:
        raise UsageError(
            f"{OPTION} is {count}, but {jax.process_count()} processes run together; expected all "
            f"of their devices, {found}"
        )
    for name, size_name, size in _sizes(models):
        if size % count:
            raise UsageError(
                f"{OPTION} is {count}, but the {name} has {size_name} {size}; expected a divisor "
                "of it"
            )


def _refuse_parts_of_blocks(name: str, decoder: Decoder, count: int) -> None:
    """Refuses shards whose borders lie inside blocks of weights that share a scale."""
    if decoder.fp8 is None or not decoder.fp8.blocks:
        return
    for side, size in block_sides(decoder).items():
        if size // count % BLOCK:
            raise UsageError(
                f"{OPTION} is {count}, so each device would get {size // count} of the {name}'s "
                f"{side} {size}; expected a multiple of {BLOCK}, as FP8 weights in blocks of "
                f"{BLOCK}x{BLOCK} need it; choose fewer, or {OTHERS[name]}"
            )


def _sizes(models: Models) -> Iterator[tuple[str, str, int]]:
    for name, model in _cut_models(models):
        yield from ((name, *size) for size in cut_sizes(model.config).items())


def _cut_models(models: Models) -> Iterator[tuple[str, CheckpointTarget | DrafterModule]]:
    """The models that are cut, by their names."""
    named = {"target": models.target, "drafter": drafter_in(models.proposers)}
    for name, model in named.items():
        if isinstance(model, CheckpointTarget | DrafterModule):
            yield name, model


def _cut(one: Any, shards: Shards) -> Any:
    if not isinstance(one, Shardable):
        kind = type(one).__name__
        raise UsageError(
            f"{OPTION} is {shards.count}, but the proposer {kind} has no `with_shards`; expected 1"
        )
    return one.with_shards(shards)


def _devices(count: int) -> str:
    kind = jax.local_devices()[0].platform.upper()
    return kind if count == 1 else f"{kind}s"
