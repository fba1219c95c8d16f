"""Dense forwards over whole sequences, on the modules and parameters that decode over pages.

A drafter sees a sequence as many blocks at once, each as decoding would see it:

    context    0 1 2 3 4 5 6 7 8 9 ...        features of the target, one row per position
    block a    . . . [3 m m m]                sees context 0..2 and itself
    block b    . . . . . . . [7 m m m]        sees context 0..6 and itself, nothing of block a

A target is the same thing with one causal block that starts at 0 and has no context.

Run with `module.apply({"params": params}, ..., method=block_hidden)`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.layers.decoder import Attention, BlockMask, DecoderLayer, Rotation
from jaxspec.layers.linear import RMSNorm
from jaxspec.layers.rope import Rope, rotation
from jaxspec.models.dflash import DFlash
from jaxspec.models.qwen3 import Qwen3
from pallas_kernels.add_norm.reference import added
from pallas_kernels.qkv_write.reference import rotate

MASKED = -1e30


class Context(NamedTuple):
    """What the blocks of one batch of sequences may look at besides themselves."""

    rows: Float[Array, "batch length hidden"]
    """Input of every layer's key and value projection; length 0 for a target."""
    rotated: Rotation
    """Of positions 0 .. length - 1."""


class Blocks(NamedTuple):
    """Where the blocks of one batch of sequences sit."""

    anchors: Int[Array, "batch blocks"]
    """Position of each block's first row."""
    width: int
    rotated: Rotation
    """Of all rows of all blocks, blocks one after the other."""


def causal_hidden(
    target: Qwen3, tokens: Int[Array, "batch length"]
) -> tuple[Float[Array, "batch length hidden"], Float[Array, "batch length features"]]:
    """Final hidden states and captured features of whole sequences from position 0."""
    batch, length = tokens.shape
    geometry = target.config.decoder
    x = target.embedding(tokens)
    start = jnp.zeros((batch, 1), jnp.int32)
    blocks = blocks_at(start, length, geometry.rope, geometry.head_dim)
    nothing = Context(x[:, :0], tuple(part[:, :0] for part in blocks.rotated))
    after = []
    for layer in target.layers:
        x = layer_over_blocks(layer, x, nothing, blocks)
        after.append(x)
    features = [after[i] for i in target.capture] or [x[..., :0]]
    return target.norm(x), jnp.concatenate(features, axis=-1)


def block_hidden(
    drafter: DFlash,
    embedded: Float[Array, "batch rows hidden"],
    features: Float[Array, "batch length features"],
    anchors: Int[Array, "batch blocks"],
) -> Float[Array, "batch rows hidden"]:
    """Final hidden states of every block, `block_size` rows each, blocks one after the other."""
    geometry = drafter.config.decoder
    blocks = blocks_at(anchors, drafter.config.block_size, geometry.rope, geometry.head_dim)
    positions = jnp.broadcast_to(jnp.arange(features.shape[1]), features.shape[:2])
    context = Context(
        drafter.feature_norm(drafter.feature_projection(features)),
        rotation(geometry.rope, geometry.head_dim, positions),
    )
    x = embedded
    for layer in drafter.layers:
        x = layer_over_blocks(layer, x, context, blocks)
    return drafter.norm(x)


def blocks_at(anchors: Int[Array, "batch blocks"], width: int, rope: Rope, head_dim: int) -> Blocks:
    positions = anchors[..., None] + jnp.arange(width, dtype=anchors.dtype)
    return Blocks(anchors, width, rotation(rope, head_dim, positions.reshape(anchors.shape[0], -1)))


def layer_over_blocks(
    layer: DecoderLayer, x: Float[Array, "batch rows hidden"], context: Context, blocks: Blocks
) -> Float[Array, "batch rows hidden"]:
    x = x + attention_over_blocks(layer.attention, x, context, blocks)
    return added(x, layer.mlp(layer.mlp.norm(x)))


def attention_over_blocks(
    attention: Attention,
    x: Float[Array, "batch rows hidden"],
    context: Context,
    blocks: Blocks,
) -> Float[Array, "batch rows hidden"]:
    g = attention.geometry
    batch, num_blocks = blocks.anchors.shape
    fused = by_head(attention.qkv(attention.norm(x)), g.head_dim)
    of_context = by_head(
        attention.qkv.columns(context.rows, start=g.num_heads * g.head_dim), g.head_dim
    )
    query, key, value = jnp.split(fused, [g.num_heads, g.num_heads + g.num_kv_heads], axis=2)
    query = turned(attention.q_norm, query, blocks.rotated)
    key = turned(attention.k_norm, key, blocks.rotated)
    context_key, context_value = jnp.split(of_context, 2, axis=2)
    context_key = turned(attention.k_norm, context_key, context.rotated)

    def per_block(rows: Float[Array, "batch rows heads head_dim"]) -> Array:
        return rows.reshape(batch, num_blocks, blocks.width, *rows.shape[2:])

    grouped = (g.num_kv_heads, g.num_heads // g.num_kv_heads, g.head_dim)
    query = query.reshape(batch, num_blocks, blocks.width, *grouped)
    attended = block_attention(
        query,
        context_key,
        context_value,
        per_block(key),
        per_block(value),
        visible_context(attention.mask, blocks.anchors, blocks.width, context.rows.shape[1]),
        visible_block(attention.mask, blocks.width),
    )
    return attention.out(attended.reshape(batch, -1, g.num_heads * g.head_dim))


def by_head(
    rows: Float[Array, "batch rows fused"], head_dim: int
) -> Float[Array, "batch rows heads {head_dim}"]:
    return rows.reshape(*rows.shape[:2], rows.shape[2] // head_dim, head_dim)


def turned(
    norm: RMSNorm, heads: Float[Array, "batch rows heads head_dim"], rotated: Rotation
) -> Float[Array, "batch rows heads head_dim"]:
    """Normed and rotated in float32, as the decoding kernels do it."""
    return rotate(norm(heads.astype(jnp.float32)), *rotated).astype(heads.dtype)


def block_attention(
    query: Float[Array, "batch blocks width kv_heads group head_dim"],
    context_key: Float[Array, "batch length kv_heads head_dim"],
    context_value: Float[Array, "batch length kv_heads head_dim"],
    block_key: Float[Array, "batch blocks width kv_heads head_dim"],
    block_value: Float[Array, "batch blocks width kv_heads head_dim"],
    sees_context: Bool[Array, "batch blocks width length"],
    sees_block: Bool[Array, "width width"],
) -> Float[Array, "batch blocks width kv_heads group head_dim"]:
    """One softmax over the context that all blocks share and the rows of the own block."""
    scale, length = query.shape[-1] ** -0.5, context_key.shape[1]

    def scores(equation: str, key: Array, visible: Array) -> Array:
        products = jnp.einsum(equation, query, key, preferred_element_type=jnp.float32)
        return jnp.where(visible, products * scale, MASKED)

    to_context = scores("bakhgd,bshd->bhgaks", context_key, sees_context[:, None, None])
    to_block = scores("bakhgd,bajhd->bhgakj", block_key, sees_block)
    weights = jax.nn.softmax(jnp.concatenate([to_context, to_block], axis=-1), axis=-1)
    weights = weights.astype(query.dtype)
    return jnp.einsum("bhgaks,bshd->bakhgd", weights[..., :length], context_value) + jnp.einsum(
        "bhgakj,bajhd->bakhgd", weights[..., length:], block_value
    )


def visible_context(
    mask: BlockMask, anchors: Int[Array, "batch blocks"], width: int, length: int
) -> Bool[Array, "batch blocks {width} {length}"]:
    """Context strictly before the anchor, and within the window of the row."""
    position = jnp.arange(length)
    row = (anchors[..., None] + jnp.arange(width))[..., None]
    visible = jnp.broadcast_to(position < anchors[..., None, None], (*anchors.shape, width, length))
    return visible if mask.window is None else visible & (position > row - mask.window)


def visible_block(mask: BlockMask, width: int) -> Bool[Array, "{width} {width}"]:
    row, other = jnp.arange(width)[:, None], jnp.arange(width)[None, :]
    visible = (other <= row) if mask.causal else jnp.ones((width, width), bool)
    return visible if mask.window is None else visible & (abs(other - row) < mask.window)
