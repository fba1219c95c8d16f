"""What the proposers of all drafter models have in common: how they call the drafter, and the
target's embedding or head if the drafter has none of its own."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.layers.kernels import OpChoice
from jaxspec.layers.shards import Shards
from jaxspec.models.target import Target
from jaxspec.proposers.device import Params
from jaxspec.sampling import probabilities
from pallas_kernels.dispatch import Implementation


@dataclasses.dataclass(frozen=True)
class DrafterProposer:
    """The base class of proposers with a drafter model; subclasses add the state and `propose`."""

    drafter: Any

    @property
    def kind(self) -> str:
        return self.drafter.config.kind

    @property
    def num_drafts(self) -> int:
        return self.drafter.config.num_drafts

    def with_kernels(self, implementation: Implementation) -> "DrafterProposer":
        return dataclasses.replace(self, drafter=self.drafter.with_kernels(implementation))

    @property
    def shards(self) -> Shards:
        """Over how many devices the drafter is sharded."""
        return self.drafter.shards

    def with_shards(self, shards: Shards) -> "DrafterProposer":
        return dataclasses.replace(self, drafter=self.drafter.with_shards(shards))

    def kernel_choices(self, batch: int, width: int, page_size: int) -> Iterator[OpChoice]:
        return self.drafter.kernel_choices(batch, width, page_size)

    def apply(self, params: Params, *inputs: Any, method: str = "__call__") -> Any:
        """Runs a method of the drafter."""
        return _apply(self.drafter, params["drafter"], *inputs, method=method)

    def embedded(
        self, target: Target, params: Params, tokens: Int[Array, "batch width"]
    ) -> Float[Array, "batch width hidden"]:
        """Tokens embedded by the drafter, or by the target if the drafter has no embedding."""
        if self.drafter.config.owns_embedding:
            embedded = self.apply(params, tokens, method="embed")
        else:
            embedded = _apply(target, params["target"], tokens, method="embed")
        return embedded.astype(self.drafter.dtype)

    def logits(
        self, target: Target, params: Params, hidden: Float[Array, "batch width hidden"]
    ) -> Float[Array, "batch width outputs"]:
        """Logits of the drafter's hidden states, over its own vocabulary if it has one. If the
        models are sharded, these are the logits of this device's part of the vocabulary."""
        if self.drafter.config.has_head:
            return self.apply(params, hidden, method="logits")
        return _apply(target, params["target"], hidden, method="logits")

    def likeliest(
        self, params: Params, logits: Float[Array, "batch width outputs"]
    ) -> Int[Array, "batch width"]:
        """The likeliest token at every place, as an id of the target's vocabulary."""
        return self.apply(params, self.shards.likeliest(logits)[0], method="target_tokens")

    def certainty(self, logits: Float[Array, "batch width outputs"]) -> Float[Array, "batch width"]:
        """The probability of the likeliest token at every place."""
        return probabilities(logits, self.shards.likeliest(logits)[0], self.shards)

    def over_target_vocabulary(
        self, params: Params, logits: Float[Array, "batch drafts outputs"]
    ) -> Float[Array, "batch drafts vocab"]:
        """Logits over the target's vocabulary, or this device's part of it: minus infinity for
        tokens that the drafter's reduced vocabulary leaves out. A device's part of the reduced
        vocabulary can be anywhere in the target's, so each device first gathers all its logits."""
        config = self.drafter.config
        if config.draft_vocab_size is None:
            return logits
        size, whole = config.vocab_size // self.shards.count, self.shards.gathered(logits)
        nowhere = jnp.full((*logits.shape[:-1], size), -jnp.inf, logits.dtype)
        places = self.shards.places(params["drafter"]["target_ids"], size)
        return nowhere.at[..., places].set(whole, mode="drop")


def _apply(model: Any, params: Any, *inputs: Any, method: str) -> Any:
    with jax.named_scope(type(model).__name__.lower()):
        return model.apply({"params": params}, *inputs, method=method)
