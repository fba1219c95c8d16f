"""Draws the anchors at which the blocks of a batch start, and cuts out the tokens of blocks."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key


def draw_anchors(
    key: Key[Array, ""], first: Int[Array, " batch"], length: int, width: int, blocks: int
) -> Int[Array, "batch {blocks}"]:
    """Different positions in each sequence, at or after `first`, whose whole blocks fit into it.

    A sequence with fewer such positions than `blocks` repeats some.
    """
    positions = jnp.arange(length)
    allowed = (positions >= jnp.maximum(first, 1)[:, None]) & (positions <= length - width)
    lottery = jax.random.uniform(key, allowed.shape)
    ranked = jnp.argsort(jnp.where(allowed, -lottery, 1.0), axis=-1)
    available = jnp.maximum(jnp.sum(allowed, axis=-1, keepdims=True), 1)
    return jnp.take_along_axis(ranked, jnp.arange(blocks)[None] % available, axis=1)


def tokens_of_blocks(
    sequences: Int[Array, "batch length"], anchors: Int[Array, "batch blocks"], width: int
) -> Int[Array, "batch blocks {width}"]:
    """The `width` tokens from each anchor on."""
    positions = anchors[..., None] + jnp.arange(width)
    flat = jnp.take_along_axis(sequences, positions.reshape(len(positions), -1), axis=1)
    return flat.reshape(positions.shape)


def block_inputs(
    tokens: Int[Array, "batch length"],
    anchors: Int[Array, "batch blocks"],
    width: int,
    mask_token_id: int,
) -> Int[Array, "batch blocks {width}"]:
    """The drafter's input tokens of each block: the anchor's token, then masks."""
    masks = jnp.full((*anchors.shape, width), mask_token_id, tokens.dtype)
    return masks.at[..., 0].set(jnp.take_along_axis(tokens, anchors, axis=1))
