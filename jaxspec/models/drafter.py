"""What the modules of all drafters have in common: embedding, head and vocabulary.

Embedding and head are the target's unless the checkpoint has its own. A drafter with a reduced
vocabulary of its own has a head over it, and stores the target's id of each of its tokens.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxspec.cache.cache import Cache
from jaxspec.cache.keys_values import KeysValues
from jaxspec.layers.axes import Axis
from jaxspec.layers.linear import Embedding, Linear
from jaxspec.layers.paged import empty_cache
from jaxspec.layers.parameter import counting, parameter
from jaxspec.layers.shards import Shards
from pallas_kernels.dispatch import Implementation


class DrafterModule(nn.Module):
    """The base class of drafters, without layers."""

    config: Any
    dtype: DTypeLike = jnp.float32
    implementation: Implementation = "auto"

    def set_up_vocabulary(self) -> Axis:
        """Makes the embedding and the head, if the checkpoint has its own. Returns the axis of the
        drafter's vocabulary."""
        config, hidden = self.config, self.config.decoder.hidden
        vocab = drafted = Axis("vocab", config.vocab_size)
        if config.owns_embedding:
            self.embedding = Embedding(vocab.cut(self.shards), hidden, self.dtype)
        if config.draft_vocab_size is not None:
            drafted = Axis("draft_vocab", config.draft_vocab_size)
            # Ids, not weights; they are among the parameters because they belong to the head.
            self.target_ids = parameter(self, "target_ids", counting, (drafted,), jnp.int32)
        if config.owns_head:
            self.head = Linear(hidden, drafted.cut(self.shards), self.dtype)
        return drafted

    @nn.nowrap
    def new_cache(self, num_slots: int, num_pages: int, page_size: int) -> Cache[KeysValues]:
        """An empty cache: pages of keys and values for every layer, nothing per slot."""
        return empty_cache(self.config.decoder, num_pages, page_size, self.dtype)

    @property
    def shards(self) -> Shards:
        """Over how many devices the model is sharded."""
        return self.config.decoder.shards

    @nn.nowrap
    def with_shards(self, shards: Shards) -> "DrafterModule":
        """The module of one device's shard. Small parts stay whole: the projection of features, the
        transition and the confidence head."""
        decoder = self.config.decoder.of_shard(shards)
        return self.clone(config=dataclasses.replace(self.config, decoder=decoder))

    @nn.nowrap
    def with_kernels(self, implementation: Implementation) -> "DrafterModule":
        return self.clone(implementation=implementation)

    def embed(self, tokens: Int[Array, "batch width"]) -> Float[Array, "batch width hidden"]:
        """Embeds tokens; only for a checkpoint with an embedding of its own."""
        return self.embedding(tokens)

    def logits(
        self, hidden: Float[Array, "batch width hidden"]
    ) -> Float[Array, "batch width outputs"]:
        """Logits of hidden states over the drafter's vocabulary, or over this device's part of it;
        only for a checkpoint with a head of its own."""
        with jax.named_scope("head"):
            return self.head(hidden)

    def target_tokens(self, drafted: Int[Array, "batch width"]) -> Int[Array, "batch width"]:
        """Converts ids of the drafter's vocabulary to ids of the target's."""
        if self.config.draft_vocab_size is None:
            return drafted
        return jnp.take(self.target_ids, drafted, axis=0)

    def touch_vocabulary(
        self, tokens: Int[Array, "batch width"], hidden: Float[Array, "batch width hidden"]
    ) -> None:
        """Uses every parameter of the embedding and the head once, for initialisation."""
        if self.config.owns_embedding:
            self.embed(tokens)
        if self.config.owns_head:
            self.target_tokens(jnp.argmax(self.logits(hidden), axis=-1))
