"""Models that were opened: modules, parameters, tokenizer, and the target as pure functions."""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.engine.setup.describe import models_in_words
from jaxspec.engine.step.io import Models
from jaxspec.models.targets import CheckpointTarget
from jaxspec.models.whole_sequences import target_features, target_logits
from jaxspec.proposers.device import Params
from jaxspec.proposers.drafters import Drafter, drafter_in
from jaxspec.text.chat import ChatTemplate
from jaxspec.text.tokenizer import Tokenizer

Logits = Callable[[Params, Int[Array, "batch length"]], Float[Array, "batch length vocab"]]
Features = Callable[
    [Params, Int[Array, "batch length"]],
    tuple[Float[Array, "batch length hidden"], Float[Array, "batch length features"]],
]


@dataclasses.dataclass(frozen=True, repr=False)
class Opened:
    """Models with their parameters on the device, and the target's tokenizer and chat template."""

    models: Models
    """The modules, which hold no arrays."""
    params: Params
    """Parameters by name: "target" and, if there is a drafter, "drafter"."""
    tokenizer: Tokenizer | None
    """None if the target's folder has no tokenizer."""
    chat_template: ChatTemplate | None
    """None if the target's folder has none."""

    @property
    def target(self) -> CheckpointTarget:
        """The target's module."""
        assert isinstance(self.models.target, CheckpointTarget), "not of a checkpoint"
        return self.models.target

    @property
    def drafter(self) -> Drafter | None:
        """The drafter's module."""
        return drafter_in(self.models.proposers)

    @property
    def logits(self) -> Logits:
        """A pure function of the target's parameters and whole sequences of tokens, [batch length],
        that returns the logits after each token."""
        return partial(target_logits, self.target)

    @property
    def features(self) -> Features:
        """Like `logits`, but returns the final hidden states and the features for a drafter."""
        return partial(target_features, self.target)

    def __repr__(self) -> str:
        models = models_in_words(self.models, self.params)
        return f"Opened({models}, {jnp.dtype(self.models.target.dtype).name})"
