"""Attention over the pages of a cache, for decoding."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxspec.cache.block import Block
from jaxspec.cache.cache import Cache
from jaxspec.cache.keys_values import KeysValues, empty_pages
from jaxspec.cache.packing import Packing
from jaxspec.layers.decoder import Attention, Decoder
from jaxspec.layers.plain_heads import write_without_norms
from jaxspec.layers.rope import Rotation, rotation
from pallas_kernels import paged_attention, qkv_write
from pallas_kernels.dispatch import Implementation
from pallas_kernels.fp8_product import RoundedRows, Rounding


@dataclasses.dataclass(frozen=True)
class Paged:
    """Writes keys and values of a block into a layer's pages, then attends over the pages."""

    block: Block
    rotation: Rotation
    """Rotary embedding of the block's positions."""
    implementation: Implementation
    over_pages: Callable[..., Array] = paged_attention
    """The attention op. In a chain of kernels, it leaves its result where the next kernel reads it.
    """
    in_chain: bool = False
    """Whether `over_pages` is that of a chain of kernels."""
    packing: Packing | None = None
    """Where the block's tokens are if they are packed. For the layers, each token is then a request
    of width 1, and `rotation` is that of the packed tokens."""

    def __call__(
        self, attention: Attention, qkv: Float[Array, "batch width fused"], pages: KeysValues
    ) -> tuple[Float[Array, "batch width attended"], KeysValues]:
        found: Any = self.of_parts(attention, qkv[None], pages)
        return found

    def of_parts(
        self,
        attention: Attention,
        qkv: Float[Array, "parts filled width fused"],
        pages: KeysValues,
        rounding: Rounding | None = None,
    ) -> tuple[Float[Array, "filled width attended"] | RoundedRows, KeysValues]:
        """The same as a call, but `qkv` is the parts of a product. `qkv` may have more requests
        than the block; the results for the surplus ones are meaningless. If the next product wants
        its inputs rounded to 8 bits, `rounding` says how; an op of a chain may then round them."""
        mask, block = attention.mask, self.block
        rounds = {"rounding": rounding} if self.in_chain else {}
        with jax.named_scope("qkv_write"):
            query, pages = self.write(attention, qkv, pages)
            query = self._by_request(query)
        with jax.named_scope("attention"):
            attended = self.over_pages(
                query,
                pages.keys,
                pages.values,
                block.page_table,
                block.lengths,
                block.counts,
                causal=mask.causal,
                window=mask.window,
                window_of_block=mask.window_of_block,
                implementation=self.implementation,
                **rounds,
            )
        if isinstance(attended, RoundedRows):
            return attended, pages
        attended = attended.reshape(*attended.shape[:2], -1)
        return attended if self.packing is None else self.packing.pack(attended), pages

    def _by_request(
        self, query: Float[Array, "filled kv_heads ..."]
    ) -> Float[Array, "batch kv_heads ..."]:
        """The queries of each request, unpacked if they are packed."""
        if self.packing is None:
            return query
        return self.packing.unpack(query.swapaxes(1, 2)).swapaxes(1, 2)

    def by_block(
        self, tokens: Float[Array, "batch width outputs"]
    ) -> Float[Array, "batch width outputs"]:
        """The tokens unchanged, because every request has one block."""
        return tokens

    def write_context(
        self, attention: Attention, context: Float[Array, "batch width hidden"], pages: KeysValues
    ) -> KeysValues:
        """Writes keys and values of tokens that have no queries."""
        parts = attention.keys_values_in_parts(context, self.implementation)
        return self.write(attention, parts, pages, queries=False)[1]

    def write(
        self,
        attention: Attention,
        qkv: Float[Array, "parts filled width fused"],
        pages: KeysValues,
        queries: bool = True,
    ) -> tuple[Float[Array, "batch kv_heads width group head_dim"], KeysValues]:
        if not attention.geometry.head_norms:
            return write_without_norms(qkv, self.rotation, self.block.cells, pages, queries)
        query, *written = qkv_write(
            qkv,
            attention.q_norm.scale if queries else None,
            attention.k_norm.scale,
            *self.rotation,
            self._cells(pages),
            pages.keys,
            pages.values,
            eps=attention.geometry.rms_norm_eps,
            implementation=self.implementation,
        )
        return query, KeysValues(*written)

    def _cells(self, pages: KeysValues) -> Int[Array, "filled width"]:
        if self.packing is None:
            return self.block.cells
        return self.packing.cells(self.block, pages.keys.shape[1])


def paged(
    decoder: Decoder,
    block: Block,
    implementation: Implementation,
    packing: Packing | None = None,
) -> Paged:
    """The attention that all layers of a decoder share in one step."""
    positions = block.positions if packing is None else packing.pack(block.positions)
    rotated = rotation(decoder.rope, decoder.head_dim, positions)
    return Paged(block, rotated, implementation, packing=packing)


def empty_cache(
    decoder: Decoder, num_pages: int, page_size: int, dtype: DTypeLike
) -> Cache[KeysValues]:
    """Empty pages for every layer of a decoder."""
    heads = decoder.num_kv_heads, decoder.head_dim
    layers = range(decoder.num_layers)
    return Cache(tuple(empty_pages(num_pages, page_size, *heads, dtype) for _ in layers))
