"""Models with random weights: a step's time does not depend on them."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxspec.engine.step.io import Models
from jaxspec.models.config import DFlashConfig, Qwen3Config
from jaxspec.models.dflash import DFlash
from jaxspec.models.parameters import random_params
from jaxspec.models.qwen3 import Qwen3
from jaxspec.proposers.device import Params
from jaxspec.proposers.dflash import DFlashProposer


@dataclass(frozen=True)
class RandomPair:
    """A target and a drafter for it, with their parameters."""

    target: Qwen3
    drafter: DFlash
    params: Params

    @property
    def models(self) -> Models:
        return Models(self.target, (DFlashProposer(self.drafter),))

    @property
    def target_alone(self) -> Models:
        """The target without the features that only a drafter reads."""
        return Models(replace(self.target, capture=()))

    @property
    def target_params(self) -> Params:
        return {"target": self.params["target"]}


def random_pair(
    config: Qwen3Config, draft: DFlashConfig, dtype: DTypeLike = jnp.bfloat16
) -> RandomPair:
    """Of these shapes; nothing is downloaded."""
    target, drafter = Qwen3(config, draft.target_layer_ids, dtype), DFlash(draft, dtype)
    params = {
        "target": random_params(target, jax.random.key(0)),
        "drafter": random_params(drafter, jax.random.key(1)),
    }
    return RandomPair(target, drafter, jax.block_until_ready(params))
