"""Queries, keys, values, decays and betas from a recurrent layer's projection, in plain JAX.

    outputs of the projection     queries | keys | values | gates | betas | decays
                                  '------ channels ------'

A convolution along the tokens is applied to each channel by itself. The gates are applied to the
outputs of the rule and are not read here.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Recurrent(NamedTuple):
    """A block of tokens as the gated delta rule takes them."""

    query: Float[Array, "batch width key_heads key_dim"]
    key: Float[Array, "batch width key_heads key_dim"]
    value: Float[Array, "batch width value_heads value_dim"]
    log_decay: Float[Array, "batch width value_heads"]
    beta: Float[Array, "batch width value_heads"]


def recurrent_rows(
    inputs: Float[Array, "batch width outputs"],
    before: Float[Array, "batch recent channels"],
    taps: Float[Array, "taps channels"],
    decay_bias: Float[Array, " value_heads"],
    log_rate: Float[Array, " value_heads"],
    key_dim: int,
    value_dim: int,
) -> Recurrent:
    """The block after the convolution. `before` has the channels of the tokens just before it."""
    heads, channels = decay_bias.shape[0], taps.shape[1]
    values = heads * value_dim
    keys = (channels - values) // 2
    ends = [channels, channels + values, inputs.shape[-1] - heads]
    mixed, _, beta, decay = jnp.split(inputs, ends, axis=-1)
    decay = jax.nn.softplus(decay.astype(jnp.float32) + decay_bias)
    convolved = convolve(joined(before, mixed), taps)
    query, key, value = jnp.split(convolved, [keys, 2 * keys], axis=-1)
    by_head = lambda x, dim: x.reshape(*x.shape[:2], -1, dim)
    return Recurrent(
        by_head(query, key_dim),
        by_head(key, key_dim),
        by_head(value, value_dim),
        -jnp.exp(log_rate) * decay,
        jax.nn.sigmoid(beta.astype(jnp.float32)),
    )


def last_inputs(
    before: Float[Array, "batch recent channels"],
    inputs: Float[Array, "batch width outputs"],
    counts: Int[Array, " batch"],
) -> Float[Array, "batch recent channels"]:
    """The last inputs of the convolution after the first `counts` tokens of a block."""
    seen = jnp.concatenate([before, inputs[..., : before.shape[2]]], axis=1)
    last = counts[:, None] + jnp.arange(before.shape[1], dtype=counts.dtype)
    return jnp.take_along_axis(seen, last[..., None], axis=1)


def joined(
    before: Float[Array, "batch recent channels"], mixed: Float[Array, "batch width channels"]
) -> Float[Array, "batch positions channels"]:
    """`before`, then `mixed`. It is written as a `where`, because XLA fuses that with its reader; a
    concatenation would be a kernel of its own that writes everything."""
    recent, width = before.shape[1], mixed.shape[1]
    is_before = jnp.arange(recent + width)[:, None] < recent
    padded = lambda x, first, last: jnp.pad(x, ((0, 0), (first, last), (0, 0)))
    return jnp.where(is_before, padded(before, 0, width), padded(mixed, recent, 0))


def convolve(
    inputs: Float[Array, "batch positions channels"], taps: Float[Array, "taps channels"]
) -> Float[Array, "batch width channels"]:
    """SiLU of the weighted sum over each token and the tokens before it, in float32. The first
    tokens, which do not have enough tokens before them, have no output."""
    count = taps.shape[0]
    width = inputs.shape[1] - count + 1
    wide = jnp.promote_types(inputs.dtype, jnp.float32)
    terms = [inputs[:, i : i + width].astype(wide) * taps[i].astype(wide) for i in range(count)]
    return jax.nn.silu(sum(terms[1:], terms[0])).astype(inputs.dtype)
