"""Qwen3.5, dense: layers with a recurrent state, and every few layers one that attends."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
from flax import linen as nn
from jaxtyping import Array, Float, Int

from jaxspec.cache.block import Block
from jaxspec.cache.cache import Cache
from jaxspec.cache.keys_values import empty_pages
from jaxspec.cache.states import empty_states
from jaxspec.layers.axes import size_of
from jaxspec.layers.gated_delta import corrected_shapes
from jaxspec.layers.hybrid import HybridLayer
from jaxspec.layers.in_slots import InSlots
from jaxspec.layers.kernels import OpChoice, StackShape, choices_of_hybrid
from jaxspec.layers.paged import paged
from jaxspec.layers.shards import Shards
from jaxspec.layers.stack import run_hybrid_layers
from jaxspec.models.config import LayerKind, Qwen35Config
from jaxspec.models.language_model import LanguageModel
from jaxspec.models.parameters import num_bytes


class Qwen35(LanguageModel):
    """The target. `module.apply({"params": params}, tokens, block, cache)` is a pure function."""

    config: Qwen35Config
    row_by_row: bool = False
    """Whether blocks of drafts are read row by row, so that bits do not depend on where a block
    begins. In matrix products they take less time."""

    def setup(self) -> None:
        super().setup()
        config = self.config
        self.layers = [
            HybridLayer(config.decoder, config.delta if kind == "delta" else None, self.dtype)
            for kind in config.layer_kinds
        ]

    @nn.nowrap
    def new_cache(self, num_slots: int, num_pages: int, page_size: int) -> Cache[Any]:
        """An empty cache: pages for the layers that attend, states per slot for the others."""
        decoder, delta = self.config.decoder, self.config.delta
        matrix = delta.value_heads, delta.key_dim, delta.value_dim
        tail = delta.taps - 1, size_of(delta.channels)
        heads = decoder.num_kv_heads, decoder.head_dim

        def of_layer(kind: LayerKind) -> Any:
            if kind == "delta":
                return empty_states(num_slots, matrix, tail, self.dtype)
            return empty_pages(num_pages, page_size, *heads, self.dtype)

        return Cache(tuple(map(of_layer, self.config.layer_kinds)))

    @nn.nowrap
    def with_shards(self, shards: Shards) -> "Qwen35":
        whole = self.config
        decoder, delta = whole.decoder.of_shard(shards), whole.delta.of_shard(shards)
        return self.clone(config=dataclasses.replace(whole, decoder=decoder, delta=delta))

    @nn.nowrap
    def reading_row_by_row(self) -> "Qwen35":
        return self.clone(row_by_row=True)

    @nn.nowrap
    def bytes_until_commit(self, batch: int, width: int) -> int:
        """Bytes that the recurrent layers keep of a block until its commit: their projections and,
        if the block is read in matrix products, what these leave."""
        sizes, num_layers = self.config.delta, self.config.layer_kinds.count("delta")
        kept = [jax.ShapeDtypeStruct((batch, width, size_of(sizes.inputs)), self.dtype)]
        if width > 1 and not self.row_by_row:
            kept += corrected_shapes(sizes, self.dtype, batch, width)
        return num_layers * num_bytes(kept)

    @nn.nowrap
    def kernel_choices(self, batch: int, width: int, page_size: int) -> Iterator[OpChoice]:
        decoder, implementation = self.config.decoder, self.implementation
        shape = StackShape(decoder, self.dtype, implementation, batch, width, page_size)
        return choices_of_hybrid(shape, self.config.delta, self.row_by_row)

    def __call__(
        self, tokens: Int[Array, "batch width"], block: Block, cache: Cache[Any]
    ) -> tuple[
        Float[Array, "batch width hidden"], Float[Array, "batch width features"], Cache[Any]
    ]:
        """Final hidden states, the captured features concatenated, and the cache with the block."""
        x = self.embedding(tokens)
        attend = paged(self.config.decoder, block, self.implementation)
        recur = InSlots(block, self.implementation, self.row_by_row)
        ways = [recur if kind == "delta" else attend for kind in self.config.layer_kinds]
        stack = self.layers, self.norm, x, ways, cache
        hidden, after, cache = run_hybrid_layers(*stack, self.config.delta, self.implementation)
        return hidden, self.captured(x, after), cache
