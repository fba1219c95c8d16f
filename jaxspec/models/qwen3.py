"""Qwen3, dense: tokens to hidden states, features and logits, over paged keys and values."""

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
from jaxspec.cache.packing import Packing
from jaxspec.layers.axes import Axis
from jaxspec.layers.decoder import BlockMask, DecoderLayer
from jaxspec.layers.kernels import OpChoice, StackShape, choices_of_layers
from jaxspec.layers.linear import Embedding, Linear, RMSNorm
from jaxspec.layers.paged import empty_cache, paged
from jaxspec.layers.shards import Shards
from jaxspec.layers.stack import run_layers
from jaxspec.models.config import Qwen3Config
from pallas_kernels.dispatch import Implementation


class Qwen3(nn.Module):
    """The target. `module.apply({"params": params}, tokens, block, cache)` is a pure function."""

    config: Qwen3Config
    capture: tuple[int, ...] = ()
    """Layers after which the residual stream is captured as features, in this order."""
    dtype: DTypeLike = jnp.float32
    implementation: Implementation = "auto"

    def setup(self) -> None:
        config, decoder = self.config, self.config.decoder
        vocab = Axis("vocab", config.vocab_size).cut(decoder.shards)
        self.embedding = Embedding(vocab, decoder.hidden, self.dtype)
        self.layers = [
            DecoderLayer(decoder, BlockMask(causal=True), self.dtype)
            for _ in range(decoder.num_layers)
        ]
        self.norm = RMSNorm(decoder.hidden, decoder.rms_norm_eps, self.dtype)
        if not config.tie_word_embeddings:
            self.head = Linear(decoder.hidden, vocab, self.dtype)

    @nn.nowrap
    def new_cache(self, num_slots: int, num_pages: int, page_size: int) -> Cache[KeysValues]:
        """An empty cache: pages of keys and values for every layer, nothing per slot."""
        return empty_cache(self.config.decoder, num_pages, page_size, self.dtype)

    @nn.nowrap
    def with_kernels(self, implementation: Implementation) -> "Qwen3":
        return self.clone(implementation=implementation)

    @nn.nowrap
    def with_shards(self, shards: Shards) -> "Qwen3":
        decoder = self.config.decoder.of_shard(shards)
        return self.clone(config=dataclasses.replace(self.config, decoder=decoder))

    @nn.nowrap
    def with_quantised_inputs(self) -> "Qwen3":
        """The same model, whose 8-bit matrices multiply activations that are rounded to 8 bits."""
        decoder = self.config.decoder
        assert decoder.fp8 is not None, "the matrices are not in 8 bits"
        fp8 = dataclasses.replace(decoder.fp8, quantised_inputs=True)
        decoder = dataclasses.replace(decoder, fp8=fp8)
        return self.clone(config=dataclasses.replace(self.config, decoder=decoder))

    @nn.nowrap
    def kernel_choices(
        self, batch: int, width: int, page_size: int, num_packed: int | None = None
    ) -> Iterator[OpChoice]:
        decoder, implementation = self.config.decoder, self.implementation
        sizes = batch, width, page_size, num_packed
        shape = StackShape(decoder, self.dtype, implementation, *sizes)
        return choices_of_layers(shape, (BlockMask(causal=True),))

    takes_packed = True

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def shards(self) -> Shards:
        """On how many devices the model is cut."""
        return self.config.decoder.shards

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.config.eos_token_ids

    @property
    def max_positions(self) -> int:
        return self.config.decoder.max_position_embeddings

    def __call__(
        self,
        tokens: Int[Array, "batch width"],
        block: Block,
        cache: Cache[KeysValues],
        packing: Packing | None = None,
    ) -> tuple[
        Float[Array, "filled tokens hidden"],
        Float[Array, "filled tokens features"],
        Cache[KeysValues],
    ]:
        """Final hidden states, the captured features concatenated, and the cache with the block.

        With a packing, the results are those of the packed tokens, each as a request of width 1.
        """
        x = self.embedding(tokens if packing is None else packing.pack(tokens))
        attend = paged(self.config.decoder, block, self.implementation, packing)
        hidden, after, cache = run_layers(self.layers, self.norm, x, attend, cache)
        features = [after[i] for i in self.capture] or [x[..., :0]]
        return hidden, jnp.concatenate(features, axis=-1), cache

    def embed(self, tokens: Int[Array, "batch width"]) -> Float[Array, "batch width hidden"]:
        return self.embedding(tokens)

    def logits(
        self, hidden: Float[Array, "batch width hidden"]
    ) -> Float[Array, "batch width outputs"]:
        """Logits of the vocabulary, or of this device's part of it."""
        with jax.named_scope("head"):
            if self.config.tie_word_embeddings:
                return self.embedding.logits(hidden)
            return self.head(hidden)

    def touch(self) -> None:
        """Uses every parameter once, for initialisation."""
        block, cache = one_token(), self.new_cache(num_slots=1, num_pages=2, page_size=16)
        hidden, _, _ = self(block.positions, block, cache)
        self.logits(hidden)
