"""Where the blocks of a batch start, and what their rows are."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key


def draw_anchors(
    key: Key[Array, ""],
    first: Int[Array, " batch"],
    length: int,
    block_size: int,
    count: int,
) -> Int[Array, "batch {count}"]:
    """Different places of each sequence, at or after `first`, whose whole block fits inside.

    A sequence with fewer such places than `count` repeats some.
    """
    places = jnp.arange(length)
    allowed = (places >= jnp.maximum(first, 1)[:, None]) & (places <= length - block_size)
    lottery = jax.random.uniform(key, allowed.shape)
    ranked = jnp.argsort(jnp.where(allowed, -lottery, 1.0), axis=-1)
    available = jnp.maximum(jnp.sum(allowed, axis=-1, keepdims=True), 1)
    return jnp.take_along_axis(ranked, jnp.arange(count)[None] % available, axis=1)


def block_rows(
    sequence: Int[Array, "batch length"], anchors: Int[Array, "batch blocks"], block_size: int
) -> Int[Array, "batch blocks {block_size}"]:
    """What stands at the rows of each block."""
    places = anchors[..., None] + jnp.arange(block_size)
    flat = jnp.take_along_axis(sequence, places.reshape(len(places), -1), axis=1)
    return flat.reshape(places.shape)


def block_inputs(
    tokens: Int[Array, "batch length"],
    anchors: Int[Array, "batch blocks"],
    block_size: int,
    mask_token_id: int,
) -> Int[Array, "batch blocks {block_size}"]:
    """The anchor's token, then masks."""
    masks = jnp.full((*anchors.shape, block_size), mask_token_id, tokens.dtype)
    return masks.at[..., 0].set(jnp.take_along_axis(tokens, anchors, axis=1))


def with_noise(
    key: Key[Array, ""], features: Float[Array, "batch length features"], fraction: float
) -> Float[Array, "batch length features"]:
    if fraction == 0.0:
        return features
    wide = features.astype(jnp.float32)
    size = jnp.sqrt(jnp.mean(wide * wide, axis=-1, keepdims=True))
    noise = jax.random.normal(key, features.shape) * size * fraction
    return (wide + noise).astype(features.dtype)
