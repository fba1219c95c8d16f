"""Dense forwards over whole sequences, with the same modules and parameters as decoding over pages.

A drafter sees a sequence as many blocks at once, each as decoding would see it:

    context    0 1 2 3 4 5 6 7 8 9 ...        features of the target, one per position
    block a    . . . [3 m m m]                sees context 0..2 and itself
    block b    . . . . . . . [7 m m m]        sees context 0..6 and itself, nothing of block a

A target is the special case of one causal block that starts at 0 and has no context.

Run with `module.apply({"params": params}, ..., method=block_hidden)`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.layers.axes import size_of
from jaxspec.layers.decoder import Attention, BlockMask, Decoder, DecoderLayer
from jaxspec.layers.gated_delta import GatedDelta
from jaxspec.layers.hybrid import HybridLayer
from jaxspec.layers.linear import RMSNorm
from jaxspec.layers.rope import Rotation, rotation
from jaxspec.models.dflash import DFlash
from jaxspec.models.parameters import Params
from jaxspec.models.targets import CheckpointTarget
from pallas_kernels import delta_prefill
from pallas_kernels.qkv_write.reference import rotate

MASKED = -1e30


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Attends over whole sequences: each block sees its context and itself. There is no cache, so a
    layer's memory is None."""

    context: Float[Array, "batch length hidden"]
    """Input of every layer's key and value projection; length 0 for a target."""
    context_rotation: tuple[Float[Array, "batch length half"], Float[Array, "batch length half"]]
    """Rotary embedding of positions 0 .. length - 1."""
    anchors: Int[Array, "batch blocks"]
    """Position of each block's first token."""
    width: int
    rotation: tuple[Float[Array, "batch tokens half"], Float[Array, "batch tokens half"]]
    """Rotary embedding of all tokens, one block after the other."""

    def __call__(
        self, attention: Attention, qkv: Float[Array, "batch tokens fused"], memory: None
    ) -> tuple[Float[Array, "batch tokens attended"], None]:
        g, length = attention.geometry, self.context.shape[1]
        fused = by_head(qkv, g.head_dim)
        of_context = by_head(attention.keys_values(self.context), g.head_dim)
        query, key, value = jnp.split(fused, [g.num_heads, g.num_heads + g.num_kv_heads], axis=2)
        context_key, context_value = jnp.split(of_context, 2, axis=2)
        key = norm_and_rotate(attention.k_norm, key, self.rotation)
        query = norm_and_rotate(attention.q_norm, query, self.rotation)
        grouped = (g.num_kv_heads, g.num_heads // g.num_kv_heads, g.head_dim)
        attended = block_attention(
            self.by_block(query.reshape(*query.shape[:2], *grouped)),
            norm_and_rotate(attention.k_norm, context_key, self.context_rotation),
            context_value,
            self.by_block(key),
            self.by_block(value),
            visible_context(attention.mask, self.anchors, self.width, length),
            visible_block(attention.mask, self.width),
        )
        return attended.reshape(*qkv.shape[:2], -1), None

    def by_block(
        self, tokens: Float[Array, "batch tokens ..."]
    ) -> Float[Array, "batch blocks {self.width} ..."]:
        """The tokens with an axis along each block."""
        return tokens.reshape(*self.anchors.shape, self.width, *tokens.shape[2:])


def causal_hidden(
    target: CheckpointTarget, tokens: Int[Array, "batch length"]
) -> tuple[Float[Array, "batch length hidden"], Float[Array, "batch length features"]]:
    """Final hidden states and captured features of whole sequences from position 0."""
    batch, length = tokens.shape
    x = target.embedding(tokens)
    start = jnp.zeros((batch, 1), jnp.int32)
    blocks = blocks_at(start, length, x[:, :0], target.config.decoder)
    after = []
    for layer in target.layers:
        x, _ = layer(x, _way_of(layer, blocks), None)
        after.append(x)
    return target.norm(x), target.captured(x, after)


def _way_of(layer: DecoderLayer | HybridLayer, blocks: Blocks) -> Any:
    """How the layer's mixer sees earlier tokens: by attention or by the delta rule."""
    if isinstance(layer, HybridLayer) and layer.delta_sizes is not None:
        return from_the_start
    return blocks


def from_the_start(
    mixer: GatedDelta,
    inputs: Float[Array, "batch length outputs"],
    memory: None,
) -> tuple[Float[Array, "batch length attended"], None]:
    """The delta rule over whole sequences, with states that begin as zeros."""
    batch, length, _ = inputs.shape
    sizes = mixer.sizes
    before = jnp.zeros((batch, sizes.taps - 1, size_of(sizes.channels)), inputs.dtype)
    slots = jnp.arange(batch, dtype=jnp.int32)
    outputs, _ = delta_prefill(
        *mixer.rows(before, inputs),
        jnp.zeros((batch, sizes.value_heads, sizes.key_dim, sizes.value_dim), jnp.float32),
        slots,
        jnp.zeros_like(slots),
        jnp.full_like(slots, length),
        implementation="xla",  # which has a gradient
    )
    return mixer.gated(outputs, inputs), None


def target_logits(
    target: CheckpointTarget, params: Params, tokens: Int[Array, "batch length"]
) -> Float[Array, "batch length vocab"]:
    """The target's logits after every token of whole sequences: a pure function of `params`."""
    logits: Any = target.apply({"params": params}, tokens, method=_causal_logits)
    return logits


def target_features(
    target: CheckpointTarget, params: Params, tokens: Int[Array, "batch length"]
) -> tuple[Float[Array, "batch length hidden"], Float[Array, "batch length features"]]:
    """Final hidden states and captured features: a pure function of `params`."""
    hidden_and_features: Any = target.apply({"params": params}, tokens, method=causal_hidden)
    return hidden_and_features


def _causal_logits(
    target: CheckpointTarget, tokens: Int[Array, "batch length"]
) -> Float[Array, "batch length vocab"]:
    return target.logits(causal_hidden(target, tokens)[0])


def block_hidden(
    drafter: DFlash,
    embedded: Float[Array, "batch tokens hidden"],
    features: Float[Array, "batch length features"],
    anchors: Int[Array, "batch blocks"],
) -> Float[Array, "batch tokens hidden"]:
    """Final hidden states of all rows of every block, one block after the other."""
    context = drafter.feature_norm(drafter.feature_projection(features))
    blocks = blocks_at(anchors, drafter.config.rows, context, drafter.config.decoder)
    x = drafter.scaled(embedded)
    for layer in drafter.layers:
        x, _ = layer(x, blocks, None)
    return drafter.norm(x)


def blocks_at(
    anchors: Int[Array, "batch blocks"],
    width: int,
    context: Float[Array, "batch length hidden"],
    decoder: Decoder,
) -> Blocks:
    def rotated(positions: Int[Array, "batch positions"]) -> Rotation:
        return rotation(decoder.rope, decoder.head_dim, positions)

    batch, length = context.shape[:2]
    positions = anchors[..., None] + jnp.arange(width, dtype=anchors.dtype)
    before = jnp.broadcast_to(jnp.arange(length), (batch, length))
    return Blocks(context, rotated(before), anchors, width, rotated(positions.reshape(batch, -1)))


def by_head(
    tokens: Float[Array, "batch tokens fused"], head_dim: int
) -> Float[Array, "batch tokens heads {head_dim}"]:
    return tokens.reshape(*tokens.shape[:2], tokens.shape[2] // head_dim, head_dim)


def norm_and_rotate(
    norm: RMSNorm, heads: Float[Array, "batch tokens heads head_dim"], rotated: Rotation
) -> Float[Array, "batch tokens heads head_dim"]:
    """Norms and rotates in float32, as the decoding kernels do."""
    return rotate(norm(heads.astype(jnp.float32)), *rotated).astype(heads.dtype)


def block_attention(
    query: Float[Array, "batch blocks width kv_heads group head_dim"],
    context_key: Float[Array, "batch length kv_heads head_dim"],
    context_value: Float[Array, "batch length kv_heads head_dim"],
    block_key: Float[Array, "batch blocks positions kv_heads head_dim"],
    block_value: Float[Array, "batch blocks positions kv_heads head_dim"],
    sees_context: Bool[Array, "batch blocks width length"],
    sees_block: Bool[Array, "width positions"],
) -> Float[Array, "batch blocks width kv_heads group head_dim"]:
    """Attention with one softmax over the shared context and the positions of the own block."""
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
    """Whether each token sees each position of the context: those before its block's anchor, and
    within the window of the token or of the block."""
    position = jnp.arange(length)
    own = (anchors[..., None] + jnp.arange(width))[..., None]
    visible = jnp.broadcast_to(position < anchors[..., None, None], (*anchors.shape, width, length))
    if mask.window is None:
        return visible
    if mask.window_of_block:
        return visible & (position >= anchors[..., None, None] - mask.window)
    return visible & (position > own - mask.window)


def visible_block(mask: BlockMask, width: int) -> Bool[Array, "{width} {width}"]:
    own, other = jnp.arange(width)[:, None], jnp.arange(width)[None, :]
    visible = (other <= own) if mask.causal else jnp.ones((width, width), bool)
    if mask.window is None or mask.window_of_block:
        return visible
    return visible & (abs(other - own) < mask.window)
