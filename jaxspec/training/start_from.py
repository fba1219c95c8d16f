"""A drafter that starts from a trained DFlash drafter, instead of from random weights."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxspec.checkpoint.load import Checkpoint, open_drafter
from jaxspec.checkpoint.pair import check_pair
from jaxspec.errors import UsageError
from jaxspec.models.config import DFlashConfig, DrafterConfig, TargetConfig
from jaxspec.models.parameters import Params
from jaxspec.training.new_drafter import with_heads
from jaxspec.training.recipe import DrafterShape

HEADS = ("transition", "confidence_head")
"""Parts that a plain DFlash drafter lacks, besides convolutions."""


def opened_start(folder: Path, target: TargetConfig) -> Checkpoint[DFlashConfig]:
    """The drafter to start from. It must be plain, and share the target's embedding and head, as
    drafters in z-lab's layout do."""
    checkpoint = open_drafter(folder)
    config = checkpoint.config
    check_pair(target, config)
    if not isinstance(config, DFlashConfig) or config.kind != "dflash":
        raise UsageError(f"{folder} is a {config.kind} drafter; start from a plain DFlash drafter")
    if config.owns_embedding or config.owns_head:
        raise UsageError(
            f"{folder} has an embedding or a head of its own; start from a DFlash drafter in "
            "z-lab's layout, which has the target's"
        )
    return Checkpoint(config, checkpoint.exact_dtype, checkpoint.load, checkpoint.num_bytes)


def shape_of(config: DFlashConfig, shape: DrafterShape) -> DrafterShape:
    """The options of a new drafter, those that a drafter already decides replaced by its own."""
    return dataclasses.replace(
        shape,
        block_size=config.block_size,
        layers=config.decoder.num_layers,
        intermediate_size=config.decoder.intermediate_size,
        layer_ids=config.target_layer_ids,
        features=len(config.target_layer_ids),
    )


def config_from(start: DFlashConfig, shape: DrafterShape, target: TargetConfig) -> DFlashConfig:
    """The drafter with the heads of the asked kind; which rows draft stays as it is."""
    if shape.kind == "eagle3" or shape.draft_vocab_size is not None or shape.from_target:
        raise UsageError(
            "a drafter that starts from a DFlash drafter cannot be an EAGLE-3 drafter, have a "
            "reduced vocabulary or copies of the target's layers; leave these options out"
        )
    plain = dataclasses.replace(start, num_target_layers=target.decoder.num_layers)
    return with_heads(plain, shape, anchor_first=start.anchor_first)


def with_weights_of(start: Checkpoint[DFlashConfig], params: Params) -> Params:
    """The parameters, those that the drafter has replaced by its own."""
    own = flatten_dict(start.load(jnp.float32), sep="/")
    return unflatten_dict(flatten_dict(params, sep="/") | own, sep="/")


def names_of_heads(config: DrafterConfig) -> tuple[str, ...]:
    """The parts to learn if only heads are learned."""
    if not isinstance(config, DFlashConfig) or config.transition is None:
        raise UsageError(
            f"a {config.kind} drafter has no heads to learn alone; train --kind dspark or dflash2, "
            "or leave out --learn heads"
        )
    return HEADS
