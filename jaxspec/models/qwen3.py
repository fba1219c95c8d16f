"""Qwen3, dense: tokens to hidden states, features and logits, over paged keys and values."""

import dataclasses
from collections.abc import Iterator

from flax import linen as nn
from jaxtyping import Array, Float, Int

from jaxspec.cache.block import Block
from jaxspec.cache.cache import Cache
from jaxspec.cache.keys_values import KeysValues
from jaxspec.cache.packing import Packing
from jaxspec.layers.decoder import BlockMask, DecoderLayer
from jaxspec.layers.kernels import OpChoice, StackShape, choices_of_layers
from jaxspec.layers.paged import empty_cache, paged
from jaxspec.layers.shards import Shards
from jaxspec.layers.stack import run_layers
from jaxspec.models.config import Qwen3Config
from jaxspec.models.language_model import LanguageModel


class Qwen3(LanguageModel):
    """The target. `module.apply({"params": params}, tokens, block, cache)` is a pure function."""

    config: Qwen3Config

    def setup(self) -> None:
        super().setup()
        decoder = self.config.decoder.with_kernels(self.implementation)
        self.layers = [
            DecoderLayer(decoder, BlockMask(causal=True), self.dtype)
            for _ in range(decoder.num_layers)
        ]

    @nn.nowrap
    def new_cache(self, num_slots: int, num_pages: int, page_size: int) -> Cache[KeysValues]:
        """An empty cache: pages of keys and values for every layer, nothing per slot."""
        return empty_cache(self.config.decoder, num_pages, page_size, self.dtype)

    @nn.nowrap
    def with_shards(self, shards: Shards) -> "Qwen3":
        decoder = self.config.decoder.of_shard(shards)
        return self.clone(config=dataclasses.replace(self.config, decoder=decoder))

    @nn.nowrap
    def with_quantised_inputs(self) -> "Qwen3":
        """The same model, whose 8-bit matrices multiply activations that are rounded to 8 bits."""
        decoder = self.config.decoder.with_quantised_inputs()
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
    rows_may_continue = True
    """Several rows of a batch may be tokens of one request, each row right behind the one before
    it: a layer writes the keys and values of all rows before any of them attends."""

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
        return hidden, self.captured(x, after), cache
