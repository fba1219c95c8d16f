"""`block_read` and `block_fold` in plain JAX, the specification: a short block in matrix products.

With S the state before the block, u the corrections, and G the sums of the log decays up to and
including each row, the rows of a block of one head are

    u[i]       = beta[i] (v[i] - exp(G[i]) S^T k[i]) - sum over j < i of A[i, j] u[j]
    output[i]  = exp(G[i]) S^T q[i] + sum over j <= i of B[i, j] u[j]
    S after n  = exp(G[n]) S + sum over j <= n of exp(G[n] - G[j]) k[j] u[j]^T

    A[i, j]    = beta[i] exp(G[i] - G[j]) k[i] . k[j]
    B[i, j]    = exp(G[i] - G[j]) q[i] . k[j]

The products with S and those among keys and queries do not depend on each other. Only the sums over
corrections go row after row. A correction depends on no later row, so it stays right whichever rows
after it are dropped, and folding rows in needs no products with S.

If it is given the scale of a norm, `block_read` also norms its outputs, head by head, and gates
them. It keeps the keys for `block_fold` as the convolution leaves them, not normed. The
corrections are divided by the lengths of the keys instead.
"""

import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.add_norm.reference import rms_norm
from pallas_kernels.gated_delta.chunks import solved
from pallas_kernels.gated_delta.projection import Recurrent, last_inputs
from pallas_kernels.gated_delta.reference import (
    EPS,
    before_block,
    or_zeros,
    put,
    rows_in_slots,
    scaled_queries,
    unit_keys,
    wide,
)


class Corrected(NamedTuple):
    """What reading a block leaves for folding in its first rows."""

    keys: Float[Array, "batch width keys"]
    """As the convolution leaves them, not normed."""
    corrections: Float[Array, "batch width values"]
    """Divided by the length of their keys."""
    decayed: Float[Array, "batch ... decays"]
    """For each value head 128 numbers, of which the first are the sums of the log decays up to and
    including each row."""


class Folding(NamedTuple):
    """What is folded in one layer: a block, as `block_read` left it, into tails and states."""

    inputs: Float[Array, "batch width outputs"]
    keys: Float[Array, "batch width keys"]
    corrections: Float[Array, "batch width values"]
    decayed: Float[Array, "batch ... decays"]
    tails: Float[Array, "slots recent channels"]
    state: Float[Array, "slots value_heads key_dim value_dim"]


class Folded(NamedTuple):
    """What a layer has after it."""

    state: Float[Array, "slots value_heads key_dim value_dim"]
    tails: Float[Array, "slots recent channels"]


OF_HEAD = 128
"""Numbers of `Corrected.decayed` for each head, one for each thread of a warpgroup."""


WIDEST = 64
"""Rows of the widest block that layers read in this form."""


def block_read(
    inputs: Float[Array, "batch width outputs"],
    tails: Float[Array, "slots recent channels"],
    taps: Float[Array, "taps channels"],
    decay_bias: Float[Array, " value_heads"],
    log_rate: Float[Array, " value_heads"],
    state: Float[Array, "slots value_heads key_dim value_dim"],
    slots: Int[Array, " batch"],
    lengths: Int[Array, " batch"],
    scale: Float[Array, " value_dim"] | None = None,
    *,
    eps: float = 0.0,
) -> tuple[Float[Array, "batch width value_heads value_dim"], Corrected]:
    given = inputs, tails, taps, decay_bias, log_rate, state, slots, lengths
    made = rows_in_slots(*given)
    # Zero times NaN in a product would spoil the rows before a row that is not finite, too.
    finite = jnp.cumprod(rows_are_finite(made), axis=1) > 0
    query, key, value, log_decay, beta = (or_zeros(part, finite) for part in made)
    width, heads = value.shape[1:3]
    by_head = lambda rows: jnp.moveaxis(wide(rows), 2, 1)
    k, q = by_head(unit_keys(key, heads)), by_head(scaled_queries(query, heads))
    v, g, b = by_head(value), by_head(log_decay), by_head(beta)
    decayed = jnp.cumsum(g, axis=-1)
    lower = jnp.tril(jnp.ones((width, width), bool))
    between = jnp.exp(jnp.where(lower, decayed[..., :, None] - decayed[..., None, :], -jnp.inf))
    before, entering = before_block(state, slots, lengths), jnp.exp(decayed)[..., None]
    with jax.default_matmul_precision("highest"):
        rest = b[..., None] * (v - entering * (k @ before))
        among_keys = b[..., None] * jnp.tril((k @ k.mT) * between, -1)
        corrections = solved(among_keys, rest)
        outputs = entering * (q @ before) + jnp.tril((q @ k.mT) * between) @ corrections
    kept = Corrected(
        key.reshape(*key.shape[:2], -1),
        in_rows(corrections / lengths_of(key, heads), finite).reshape(*key.shape[:2], -1),
        jnp.pad(decayed, ((0, 0), (0, 0), (0, OF_HEAD - width))).reshape(key.shape[0], 1, -1),
    )
    outputs = in_rows(outputs, finite).astype(value.dtype)
    if scale is not None:
        first, values = taps.shape[1], outputs.shape[2] * outputs.shape[3]
        outputs = gated(outputs, inputs[..., first : first + values], scale, eps)
    return outputs, kept


def gated(
    outputs: Float[Array, "batch width value_heads value_dim"],
    gates: Float[Array, "batch width values"],
    scale: Float[Array, " value_dim"],
    eps: float,
) -> Float[Array, "batch width value_heads value_dim"]:
    """Each head normed, then gated. Everything is float32 until the end."""
    normed = rms_norm(wide(outputs), scale, eps=eps)
    gates = jax.nn.silu(wide(gates)).reshape(normed.shape)
    return (normed * gates).astype(outputs.dtype)


def block_folds(
    layers: tuple[Folding, ...],
    slots: Int[Array, " batch"],
    lengths: Int[Array, " batch"],
    counts: Int[Array, " batch"],
) -> tuple[Folded, ...]:
    return tuple(block_fold(*layer, slots, lengths, counts) for layer in layers)


def block_fold(
    inputs: Float[Array, "batch width outputs"],
    keys: Float[Array, "batch width keys"],
    corrections: Float[Array, "batch width values"],
    decayed: Float[Array, "batch ... decays"],
    tails: Float[Array, "slots recent channels"],
    state: Float[Array, "slots value_heads key_dim value_dim"],
    slots: Int[Array, " batch"],
    lengths: Int[Array, " batch"],
    counts: Int[Array, " batch"],
) -> Folded:
    (batch, width, _), (_, heads, key_dim, value_dim) = keys.shape, state.shape
    kept = (jnp.arange(width) < counts[:, None])[:, None, :, None]
    by_head = lambda x, dim: jnp.moveaxis(x.reshape(batch, width, -1, dim), 2, 1)
    key = jnp.where(kept, wide(by_head(keys, key_dim)), 0)
    key = jnp.repeat(key, heads // key.shape[1], axis=1)
    sums = decayed.reshape(batch, heads, OF_HEAD)[..., :width]
    last = jnp.take_along_axis(sums, jnp.maximum(counts - 1, 0)[:, None, None], axis=-1)
    leaves = jnp.exp(jnp.where(kept[..., 0], last - sums, -jnp.inf))[..., None]
    with jax.default_matmul_precision("highest"):
        added = key.mT @ jnp.where(kept, by_head(corrections, value_dim) * leaves, 0)
    after = jnp.exp(last)[..., None] * before_block(state, slots, lengths) + added
    last = last_inputs(before_block(tails, slots, lengths), inputs, counts)
    return Folded(put(state, slots, after, counts), put(tails, slots, last, counts))


def rows_are_finite(made: Recurrent) -> Bool[Array, "batch width"]:
    finite = [jnp.isfinite(part).reshape(*part.shape[:2], -1).all(axis=-1) for part in made]
    return functools.reduce(operator.and_, finite)


def in_rows(
    by_head: Float[Array, "batch value_heads width value_dim"], finite: Bool[Array, "batch width"]
) -> Float[Array, "batch width value_heads value_dim"]:
    """Row by row, with NaN in the rows that are not finite and were replaced by zeros."""
    return jnp.where(finite[..., None, None], jnp.moveaxis(by_head, 1, 2), jnp.nan)


def lengths_of(
    key: Float[Array, "batch width key_heads key_dim"], heads: int
) -> Float[Array, "batch value_heads width ..."]:
    squared = jnp.square(wide(key)).sum(axis=-1, keepdims=True) + EPS
    return jnp.repeat(jnp.moveaxis(jnp.sqrt(squared), 2, 1), heads // key.shape[2], axis=1)
