"""The DFlash drafter: one pass over a block of masks, conditioned on the target's features.

    features of committed tokens --W_fc, norm--> context --k, v of every layer--> drafter's pages
    [current, mask, mask, ...]   --embedding-->  block   --layers attending pages + block--> hidden

The context is projected once and shared by all layers; it is never normed per layer, queried or
passed through an MLP. Row k of the block predicts the token at its own position.
"""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxspec.cache.block import Block, one_token
from jaxspec.cache.cache import Cache
from jaxspec.cache.keys_values import KeysValues
from jaxspec.layers.axes import Axis
from jaxspec.layers.decoder import DecoderLayer
from jaxspec.layers.kernels import (
    OpChoice,
    StackShape,
    choice_of_context,
    choices_of_layers,
)
from jaxspec.layers.linear import Embedding, Linear, RMSNorm
from jaxspec.layers.paged import empty_cache, paged
from jaxspec.layers.parameter import counting, parameter
from jaxspec.layers.stack import run_layers
from jaxspec.models.config import DFlashConfig
from pallas_kernels.dispatch import Implementation


class DFlash(nn.Module):
    """The drafter. Embedding and head are the target's unless the checkpoint has its own."""

    config: DFlashConfig
    dtype: DTypeLike = jnp.float32
    implementation: Implementation = "auto"

    def setup(self) -> None:
        config, decoder = self.config, self.config.decoder
        hidden, eps = decoder.hidden, decoder.rms_norm_eps
        features = Axis("features", len(config.target_layer_ids) * hidden.size)
        self.feature_projection = Linear(features, hidden, self.dtype)
        self.feature_norm = RMSNorm(hidden, eps, self.dtype)
        self.layers = [DecoderLayer(decoder, mask, self.dtype) for mask in config.block_masks]
        self.norm = RMSNorm(hidden, eps, self.dtype)
        vocab = drafted = Axis("vocab", config.vocab_size)
        if config.owns_embedding:
            self.embedding = Embedding(vocab, hidden, self.dtype)
        if config.draft_vocab_size is not None:
            drafted = Axis("draft_vocab", config.draft_vocab_size)
            # Ids, not weights; they are among the parameters because they belong to the head.
            self.target_ids = parameter(self, "target_ids", counting, (drafted,), jnp.int32)
        if config.owns_head:
            self.head = Linear(hidden, drafted, self.dtype)

    @nn.nowrap
    def new_cache(self, num_slots: int, num_pages: int, page_size: int) -> Cache[KeysValues]:
        """An empty cache: pages of keys and values for every layer, nothing per slot."""
        return empty_cache(self.config.decoder, num_pages, page_size, self.dtype)

    @nn.nowrap
    def with_kernels(self, implementation: Implementation) -> "DFlash":
        return self.clone(implementation=implementation)

    @nn.nowrap
    def kernel_choices(self, batch: int, width: int, page_size: int) -> Iterator[OpChoice]:
        """The ops that write the context of `width` tokens, and those that draft a block."""
        config, implementation = self.config, self.implementation
        shape = StackShape(config.decoder, self.dtype, implementation, batch, width, page_size)
        yield choice_of_context(shape)
        drafting = dataclasses.replace(shape, width=config.block_size)
        yield from choices_of_layers(drafting, config.block_masks)

    def __call__(
        self, embedded: Float[Array, "batch width hidden"], block: Block, cache: Cache[KeysValues]
    ) -> tuple[Float[Array, "batch width hidden"], Cache[KeysValues]]:
        """Final hidden states of the block, and the cache with the block's keys and values in it.

        The block's cells are scratch: the context of the same positions overwrites them once the
        target has committed those tokens.
        """
        attend = paged(self.config.decoder, block, self.implementation)
        hidden, _, cache = run_layers(self.layers, self.norm, embedded, attend, cache)
        return hidden, cache

    def write_context(
        self, features: Float[Array, "batch width features"], block: Block, cache: Cache[KeysValues]
    ) -> Cache[KeysValues]:
        """Writes the context of committed tokens, computed from the target's features of them."""
        write = paged(self.config.decoder, block, self.implementation).write_context
        context = self.feature_norm(self.feature_projection(features))
        layers = zip(self.layers, cache.layers, strict=True)
        return Cache(tuple(write(layer.attention, context, pages) for layer, pages in layers))

    def embed(self, tokens: Int[Array, "batch width"]) -> Float[Array, "batch width hidden"]:
        """Embeds tokens; only for a checkpoint with an embedding of its own."""
        return self.embedding(tokens)

    def logits(
        self, hidden: Float[Array, "batch width hidden"]
    ) -> Float[Array, "batch width draft_vocab"]:
        """Logits of hidden states; only for a checkpoint with a head of its own."""
        with jax.named_scope("head"):
            return self.head(hidden)

    def target_tokens(self, drafted: Int[Array, "batch width"]) -> Int[Array, "batch width"]:
        """Converts ids of the drafter's vocabulary to ids of the target's."""
        if self.config.draft_vocab_size is None:
            return drafted
        return jnp.take(self.target_ids, drafted, axis=0)

    def touch(self) -> None:
        """Uses every parameter once, for initialisation."""
        block, cache = one_token(), self.new_cache(num_slots=1, num_pages=2, page_size=16)
        embedded = jnp.zeros((1, 1, self.config.decoder.hidden_size), self.dtype)
        features = jnp.tile(embedded, len(self.config.target_layer_ids))
        hidden, cache = self(embedded, block, self.write_context(features, block, cache))
        if self.config.owns_embedding:
            self.embed(block.positions)
        if self.config.owns_head:
            self.target_tokens(jnp.argmax(self.logits(hidden), axis=-1))
