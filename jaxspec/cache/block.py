"""Where the rows of one step sit: their positions, and the pool rows their keys go to."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Block:
    """`width` rows per slot, right after each slot's context."""

    lengths: Int[Array, " slots"]
    """Rows of context before the block; row i of the block sits at position lengths + i."""
    spans: Int[Array, " slots"]
    """Rows of the block that are kept, from its start."""
    positions: Int[Array, "slots width"]
    """Absolute position of every row."""
    pool_rows: Int[Array, "slots width"]
    """Flat pool row (page * page_size + offset) that the row's key and value are written to."""
    page_table: Int[Array, "slots max_pages"]
    """Page of every page_size positions; 0, the trash page, where none is held."""


def block_after(
    lengths: Int[Array, " slots"],
    spans: Int[Array, " slots"],
    page_table: Int[Array, "slots max_pages"],
    width: int,
    page_size: int,
) -> Block:
    """The block of `width` rows after `lengths`, of which the first `spans` are kept.

    slot        position 0 ......... lengths | lengths ... lengths + width - 1
    kept rows                                | [0, spans)      -> the slot's pages
    other rows                               | [spans, width)  -> page 0, the trash page
    """
    offsets = jnp.arange(width, dtype=jnp.int32)
    positions = lengths[:, None] + offsets
    pages = jnp.take_along_axis(
        page_table, positions // page_size, axis=1, mode="fill", fill_value=0
    )
    kept = (offsets < spans[:, None]) & (pages > 0)
    rows = jnp.where(kept, pages * page_size + positions % page_size, offsets % page_size)
    return Block(
        lengths=lengths, spans=spans, positions=positions, pool_rows=rows, page_table=page_table
    )
