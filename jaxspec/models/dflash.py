"""The DFlash drafter: one pass over a block of masks, conditioned on the target's features.

    features of committed tokens --W_fc, norm--> context --k, v of every layer--> drafter's pages
    [current, mask, mask, ...]   --embedding-->  block   --layers attending pages + block--> hidden

The context is projected once and shared by all layers; it is never normed per layer, queried or
passed through an MLP. Row k of the block predicts the token at its own position.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxspec.cache.block import Block
from jaxspec.cache.pool import KVPool
from jaxspec.layers.decoder import DecoderLayer
from jaxspec.layers.linear import Embedding, Linear, RMSNorm
from jaxspec.layers.rope import rotation
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
        hidden, eps = decoder.hidden_size, decoder.rms_norm_eps
        num_features = len(config.target_layer_ids)
        self.feature_projection = Linear(num_features * hidden, hidden, self.dtype)
        self.feature_norm = RMSNorm(hidden, eps, self.dtype)
        self.layers = [
            DecoderLayer(decoder, mask, self.dtype, self.implementation)
            for mask in config.block_masks
        ]
        self.norm = RMSNorm(hidden, eps, self.dtype)
        if config.owns_embedding:
            self.embedding = Embedding(config.vocab_size, hidden, self.dtype)
        if config.owns_head:
            rows = config.draft_vocab_size or config.vocab_size
            self.head = Linear(hidden, rows, self.dtype)
        if config.draft_vocab_size is not None:
            # Ids, not weights; they travel with the parameters because they belong to the head.
            self.target_ids = self.param(
                "target_ids", nn.initializers.zeros, (config.draft_vocab_size,), jnp.int32
            )

    def __call__(
        self, embedded: Float[Array, "slots width hidden"], block: Block, pool: KVPool
    ) -> tuple[Float[Array, "slots width hidden"], KVPool]:
        """Final hidden states of the block, and the pool with the block's keys and values in it.

        The block's rows in the pool are scratch: the context of the same positions overwrites
        them once the target has committed those tokens.
        """
        decoder = self.config.decoder
        rotated = rotation(decoder.rope, decoder.head_dim, block.positions)
        hidden, _, pool = run_layers(self.layers, self.norm, embedded, rotated, block, pool)
        return hidden, pool

    def write_context(
        self, features: Float[Array, "slots width features"], block: Block, pool: KVPool
    ) -> KVPool:
        """Writes the context of committed tokens, from the features the target gave for them."""
        decoder = self.config.decoder
        rotated = rotation(decoder.rope, decoder.head_dim, block.positions)
        context = self.feature_norm(self.feature_projection(features))
        keys, values = list(pool.keys), list(pool.values)
        for i, layer in enumerate(self.layers):
            keys[i], values[i] = layer.attention.write_context(
                context, rotated, block, keys[i], values[i]
            )
        return KVPool(keys=tuple(keys), values=tuple(values))

    def embed(self, tokens: Int[Array, "slots width"]) -> Float[Array, "slots width hidden"]:
        """Only for a checkpoint with an embedding of its own."""
        return self.embedding(tokens)

    def logits(
        self, hidden: Float[Array, "slots width hidden"]
    ) -> Float[Array, "slots width draft_vocab"]:
        """Only for a checkpoint with a head of its own."""
        with jax.named_scope("head"):
            return self.head(hidden)

    def target_tokens(self, drafted: Int[Array, "slots width"]) -> Int[Array, "slots width"]:
        """Ids of the head's own vocabulary as ids of the target's."""
        if self.config.draft_vocab_size is None:
            return drafted
        return jnp.take(self.target_ids, drafted, axis=0)

    def touch(
        self,
        embedded: Float[Array, "slots width hidden"],
        features: Float[Array, "slots width features"],
        block: Block,
        pool: KVPool,
    ) -> None:
        """Uses every parameter once, for initialisation."""
        hidden, pool = self(embedded, block, pool)
        self.write_context(features, block, pool)
        if self.config.owns_embedding:
            self.embed(block.positions)
        if self.config.owns_head:
            self.target_tokens(jnp.argmax(self.logits(hidden), axis=-1))
