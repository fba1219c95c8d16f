"""Attention over the pages of a cache, for decoding."""

import dataclasses
from functools import partial
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
from pallas_kernels.dense_chain import Chain
from pallas_kernels.dispatch import Implementation
from pallas_kernels.fp8_product import RoundedRows, Rounding


@dataclasses.dataclass(frozen=True)
class Paged:
    """Writes keys and values of a block into a layer's pages, then attends over the pages."""

    block: Block
    rotation: Rotation
    """Rotary embedding of the block's positions."""
    implementation: Implementation
    chain: Chain | None = None
    """The chain of kernels that the layers are part of. Attention then leaves its result where the
    next kernel reads it."""
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
        attended, pages = self._in_one_op(attention, qkv, pages, rounding) or self._in_two_ops(
            attention, qkv, pages, rounding
        )
        if isinstance(attended, RoundedRows):
            return attended, pages
        attended = attended.reshape(*attended.shape[:2], -1)
        return attended if self.packing is None else self.packing.pack(attended), pages

    def _in_one_op(
        self,
        attention: Attention,
        qkv: Float[Array, "parts filled width fused"],
        pages: KeysValues,
        rounding: Rounding | None,
    ) -> tuple[Float[Array, "filled width heads head_dim"] | RoundedRows, KeysValues] | None:
        """None if no kernel writes and attends at once."""
        is_whole = len(qkv) == 1 and self.packing is None
        if self.chain is None or not (is_whole and attention.geometry.head_norms):
            return None
        scales = attention.q_norm.scale, attention.k_norm.scale
        with jax.named_scope("attention"):
            found = self.chain.attend_and_write(
                *(qkv[0], *scales, *self.rotation, pages.keys, pages.values, *self._context),
                eps=attention.geometry.rms_norm_eps,
                rounding=rounding,
                **self._options(attention),
            )
        return None if found is None else (found[0], KeysValues(*found[1:]))

    def _in_two_ops(
        self,
        attention: Attention,
        qkv: Float[Array, "parts filled width fused"],
        pages: KeysValues,
        rounding: Rounding | None,
    ) -> tuple[Float[Array, "filled width heads head_dim"] | RoundedRows, KeysValues]:
        attend = paged_attention
        if self.chain is not None:
            attend = partial(self.chain.paged_attention, rounding=rounding)
        with jax.named_scope("qkv_write"):
            query, pages = self.write(attention, qkv, pages)
            query = self._by_request(query)
        with jax.named_scope("attention"):
            found = attend(
                query, pages.keys, pages.values, *self._context, **self._options(attention)
            )
        return found, pages

    @property
    def _context(self) -> tuple[Array, Array, Array]:
        return self.block.page_table, self.block.lengths, self.block.counts

    def _options(self, attention: Attention) -> dict[str, Any]:
        mask = attention.mask
        return {
            "causal": mask.causal,
            "window": mask.window,
            "window_of_block": mask.window_of_block,
            "implementation": self.implementation,
        }

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
        _, pages = self.write(attention, attention.keys_values(context)[None], pages, queries=False)
        return pages

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
