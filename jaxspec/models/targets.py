"""The classes of targets that can be loaded from checkpoints."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxspec.models.config import Qwen35Config, TargetConfig
from jaxspec.models.qwen3 import Qwen3
from jaxspec.models.qwen35 import Qwen35

CheckpointTarget = Qwen3 | Qwen35


def target_of(
    config: TargetConfig, capture: tuple[int, ...] = (), dtype: DTypeLike = jnp.float32
) -> CheckpointTarget:
    """The target for a config. It captures the residual stream after the layers in `capture`."""
    if isinstance(config, Qwen35Config):
        return Qwen35(config, capture, dtype)
    return Qwen3(config, capture, dtype)


def without_features(target: Any) -> Any:
    """The same target without features, which plain decoding does not need. A target of another
    class is returned unchanged."""
    if isinstance(target, CheckpointTarget):
        return dataclasses.replace(target, capture=())
    return target
