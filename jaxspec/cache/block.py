"""Where the tokens of one step are: their slots, positions and cells in the cache."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Block:
    """`width` tokens of each request of the batch, right after the request's context."""

    slots: Int[Array, " batch"]
    """Slot of every request, for layers that keep one state per slot. Entries that only pad the
    batch have the padding slot, which may occur more than once, and a count of 0."""
    lengths: Int[Array, " batch"]
    """Tokens of context before the block; token i of the block has position lengths + i. A length
    of 0 begins a request: any state in the slot is then left over from an earlier request."""
    counts: Int[Array, " batch"]
    """Number of tokens that are kept, from the start of the block."""
    positions: Int[Array, "batch width"]
    """Position of every token."""
    cells: Int[Array, "batch width"]
    """Cell (page * page_size + offset) that the token's key and value are written to."""
    page_table: Int[Array, "batch max_pages"]
    """The page of each page_size positions; 0, the trash page, if the request has no page there."""
    final: bool = dataclasses.field(default=False, metadata={"static": True})
    """Whether `counts` are final when the block is read, as for a chunk of a prompt. For drafts,
    acceptance lowers them afterwards."""


def one_token() -> Block:
    """The smallest block: the first token of the request in slot 0, in page 1 of 16 positions."""
    zero, one = jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32)
    return block_after(zero, zero, one, one[:, None], width=1, page_size=16)


def block_after(
    slots: Int[Array, " batch"],
    lengths: Int[Array, " batch"],
    counts: Int[Array, " batch"],
    page_table: Int[Array, "batch max_pages"],
    width: int,
    page_size: int,
    final: bool = False,
) -> Block:
    """The block of `width` tokens after `lengths`, of which the first `counts` are kept.

    request     position 0 ......... lengths | lengths ... lengths + width - 1
    kept tokens                              | [0, counts)      -> the request's pages
    other tokens                             | [counts, width)  -> page 0, the trash page
    """
    offsets = jnp.arange(width, dtype=jnp.int32)
    positions = lengths[:, None] + offsets
    pages = jnp.take_along_axis(
        page_table, positions // page_size, axis=1, mode="fill", fill_value=0
    )
    kept = (offsets < counts[:, None]) & (pages > 0)
    cells = jnp.where(kept, pages * page_size + positions % page_size, offsets % page_size)
    return Block(slots, lengths, counts, positions, cells, page_table, final)


def joined(one: Block, other: Block) -> Block:
    """One block with the requests of both blocks, which have the same width."""
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), one, other)
