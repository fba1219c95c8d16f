"""EAGLE-3's chains over whole sequences, as decoding would draft them, for training.

    true rows      0  1  2  3  4  5  6 ..      row j: feature of position j, token j + 1; causal
    chain at 3           2'                    the newest token is 3: row 2 is true, and drafts 4
                            3' 4' 5'           the next rows have the hidden state of the one before
    row 4' sees    0  1  2  3' 4'

A chain's rows never see true rows of its own positions, nor rows of another chain. A chain reads
the tokens of the text, but its own hidden states.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.layers.decoder import Attention, Decoder
from jaxspec.layers.rope import Rotation, rotation
from jaxspec.models.eagle3 import Eagle3
from jaxspec.models.whole_sequences import block_attention, by_head, norm_and_rotate
from pallas_kernels.qkv_write.reference import rotate


class Seen(NamedTuple):
    """Keys and values of one layer that a chain sees."""

    key: Float[Array, "batch length kv_heads head_dim"]
    """Keys of the true rows. A chain sees those before its newest token."""
    value: Float[Array, "batch length kv_heads head_dim"]
    own_key: Float[Array, "batch blocks positions kv_heads head_dim"]
    """Keys of the chain's own rows so far."""
    own_value: Float[Array, "batch blocks positions kv_heads head_dim"]


def chain_hidden(
    drafter: Eagle3,
    embedded: Float[Array, "batch length hidden"],
    features: Float[Array, "batch length features"],
    anchors: Int[Array, "batch blocks"],
) -> Float[Array, "batch blocks drafts hidden"]:
    """Final hidden states of the chains whose newest tokens are at the anchors, for a bound
    drafter. `embedded` are the tokens of whole sequences."""
    config, count = drafter.config, len(drafter.layers)
    fused, (batch, length) = drafter.fuse(features), embedded.shape[:2]
    rotated = partial(rotated_positions, config.decoder)
    positions = jnp.broadcast_to(jnp.arange(length - 1), (batch, length - 1))
    rows = TrueRows(anchors, rotated(positions))
    after, seen = drafter.run(embedded[:, 1:], fused[:, :-1], rows, (None,) * count)
    hidden = at_positions(after, anchors - 1)
    final = [drafter.norm(hidden)]
    for step in range(1, config.num_drafts):
        passed_on = final[-1] if config.norm_output else hidden
        chain = ChainRows(anchors, rotated(anchors - 1 + step))
        hidden, seen = drafter.run(at_positions(embedded, anchors + step), passed_on, chain, seen)
        final.append(drafter.norm(hidden))
    return jnp.stack(final, axis=2)


@dataclasses.dataclass(frozen=True)
class TrueRows:
    """Attends causally over the true rows of whole sequences, and keeps what chains see of them."""

    anchors: Int[Array, "batch blocks"]
    rotation: Rotation

    def __call__(
        self, attention: Attention, qkv: Float[Array, "batch length fused"], memory: None
    ) -> tuple[Float[Array, "batch length attended"], Seen]:
        query, key, value = rotated_heads(attention, qkv, self.rotation)
        length = qkv.shape[1]
        attended = block_attention(
            by_group(query, key)[:, None],
            key[:, :0],
            value[:, :0],
            key[:, None],
            value[:, None],
            jnp.zeros((len(qkv), 1, length, 0), bool),
            jnp.tril(jnp.ones((length, length), bool)),
        )
        nothing = jnp.zeros((*self.anchors.shape, 0, *key.shape[2:]), key.dtype)
        return attended.reshape(*qkv.shape[:2], -1), Seen(key, value, nothing, nothing)


@dataclasses.dataclass(frozen=True)
class ChainRows:
    """Attends with one more row of every chain."""

    anchors: Int[Array, "batch blocks"]
    rotation: Rotation

    def __call__(
        self, attention: Attention, qkv: Float[Array, "batch blocks fused"], memory: Seen
    ) -> tuple[Float[Array, "batch blocks attended"], Seen]:
        query, key, value = rotated_heads(attention, qkv, self.rotation)
        own_key = jnp.concatenate([memory.own_key, key[:, :, None]], axis=2)
        own_value = jnp.concatenate([memory.own_value, value[:, :, None]], axis=2)
        before = jnp.arange(memory.key.shape[1]) < self.anchors[..., None, None]
        attended = block_attention(
            by_group(query, key)[:, :, None],
            memory.key,
            memory.value,
            own_key,
            own_value,
            before,
            jnp.ones((1, own_key.shape[2]), bool),
        )
        seen = Seen(memory.key, memory.value, own_key, own_value)
        return attended.reshape(*qkv.shape[:2], -1), seen


def rotated_positions(decoder: Decoder, positions: Int[Array, "batch positions"]) -> Rotation:
    return rotation(decoder.rope, decoder.head_dim, positions)


def rotated_heads(
    attention: Attention, qkv: Float[Array, "batch width fused"], rotated: Rotation
) -> tuple[Any, Any, Any]:
    """Queries and keys by head, normed if the drafter norms heads, and rotated; and values."""
    g = attention.geometry
    fused = by_head(qkv, g.head_dim)
    query, key, value = jnp.split(fused, [g.num_heads, g.num_heads + g.num_kv_heads], axis=2)
    if g.head_norms:
        query = norm_and_rotate(attention.q_norm, query, rotated)
        return query, norm_and_rotate(attention.k_norm, key, rotated), value
    turned = [rotate(x.astype(jnp.float32), *rotated).astype(x.dtype) for x in (query, key)]
    return turned[0], turned[1], value


def by_group(
    query: Float[Array, "batch width heads head_dim"],
    key: Float[Array, "batch width kv_heads head_dim"],
) -> Float[Array, "batch width kv_heads group head_dim"]:
    """The query heads, with a separate axis for the group that shares one key head."""
    kv_heads = key.shape[2]
    return query.reshape(*query.shape[:2], kv_heads, query.shape[2] // kv_heads, query.shape[3])


def at_positions(
    x: Float[Array, "batch length hidden"], positions: Int[Array, "batch blocks"]
) -> Float[Array, "batch blocks hidden"]:
    return jnp.take_along_axis(x, positions[..., None], axis=1)
