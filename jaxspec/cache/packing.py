"""Blocks of different lengths side by side, without padding between them.

    request     a           b     c
    padded      a0 a1 a2    b0    c0 c1       counts 3, 1, 2 in a block of width 3: 9 tokens
    packed      a0 a1 a2    b0    c0 c1 --    7 tokens, of which one is left over

Operations on single tokens run over the packed tokens, attention over the padded ones.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from jaxspec.cache.block import Block


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packing:
    """Where the kept tokens of a block are among the packed ones."""

    sources: Int[Array, " packed"]
    """Which token of the block each packed token is: request * width + place; 0 if left over."""
    filled: Bool[Array, " packed"]
    """Whether each packed token is a token of the block, not one that is left over."""
    places: Int[Array, "batch width"]
    """Packed place of every token of the block; for one that is not kept, another token's place."""

    def pack(self, padded: Shaped[Array, "batch width ..."]) -> Shaped[Array, "packed ..."]:
        """The kept tokens, each as a request of width 1."""
        tokens = padded.reshape(-1, *padded.shape[2:])
        return jnp.take(tokens, self.sources, axis=0)[:, None]

    def unpack(self, packed: Shaped[Array, "packed ..."]) -> Shaped[Array, "batch width ..."]:
        """The tokens of the block. Those that are not kept have the values of other tokens."""
        return jnp.take(packed[:, 0], self.places, axis=0)

    def cells(self, block: Block, page_size: int) -> Int[Array, "packed ..."]:
        """Cells of the packed tokens; those that are left over have cells in the trash page."""
        trash = jnp.arange(self.sources.size, dtype=jnp.int32)[:, None] % page_size
        return jnp.where(self.filled[:, None], self.pack(block.cells), trash)


def unpacked(
    tokens: Shaped[Array, "filled tokens ..."], packing: Packing | None
) -> Shaped[Array, "batch width ..."]:
    """The tokens of a block, whether they are packed or not."""
    return tokens if packing is None else packing.unpack(tokens)


def packing_of(counts: Int[Array, " batch"], width: int, num_packed: int) -> Packing:
    """Packs the first `counts` tokens of every request, at most `num_packed` tokens in all."""
    ends = jnp.cumsum(counts)
    place = jnp.arange(num_packed, dtype=jnp.int32)
    request = (place[:, None] >= ends).sum(axis=1, dtype=jnp.int32)
    filled = request < counts.size
    request = jnp.minimum(request, counts.size - 1)
    starts = (ends - counts).astype(jnp.int32)
    sources = jnp.where(filled, request * width + place - starts[request], 0)
    places = jnp.minimum(starts[:, None] + jnp.arange(width, dtype=jnp.int32), num_packed - 1)
    return Packing(sources, filled, places)
