"""The gated delta rule in plain JAX: the specification."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from pallas_kernels.gated_delta.chunks import in_chunks
from pallas_kernels.gated_delta.projection import Recurrent, recurrent_rows

EPS = 1e-6
"""Added to the squared length of keys and queries before they are normed."""
State = Float[Array, "batch value_heads key_dim value_dim"]


def delta_read(
    query: Float[Array, "batch width key_heads key_dim"],
    key: Float[Array, "batch width key_heads key_dim"],
    value: Float[Array, "batch width value_heads value_dim"],
    log_decay: Float[Array, "batch width value_heads"],
    beta: Float[Array, "batch width value_heads"],
    state: Float[Array, "slots value_heads key_dim value_dim"],
    slots: Int[Array, " batch"],
    lengths: Int[Array, " batch"],
) -> Float[Array, "batch width value_heads value_dim"]:
    heads = value.shape[2]
    rows = unit_keys(key, heads), wide(value), wide(log_decay), wide(beta)

    def one(before: State, row: tuple[Array, ...]) -> tuple[State, Array]:
        after = after_row(before, *row[1:])
        return after, (after * row[0][..., None]).sum(axis=-2)

    along = tuple(part.swapaxes(0, 1) for part in (scaled_queries(query, heads), *rows))
    _, outputs = jax.lax.scan(one, before_block(state, slots, lengths), along)
    return outputs.swapaxes(0, 1).astype(value.dtype)


def delta_fold(
    key: Float[Array, "batch width key_heads key_dim"],
    value: Float[Array, "batch width value_heads value_dim"],
    log_decay: Float[Array, "batch width value_heads"],
    beta: Float[Array, "batch width value_heads"],
    state: Float[Array, "slots value_heads key_dim value_dim"],
    slots: Int[Array, " batch"],
    lengths: Int[Array, " batch"],
    counts: Int[Array, " batch"],
) -> Float[Array, "slots value_heads key_dim value_dim"]:
    width, heads = value.shape[1:3]
    rows = unit_keys(key, heads), wide(value), wide(log_decay), wide(beta)
    kept = jnp.arange(width)[:, None] < counts

    def one(before: State, row: tuple[Array, ...]) -> tuple[State, None]:
        return jnp.where(row[0][:, None, None, None], after_row(before, *row[1:]), before), None

    along = kept, *(part.swapaxes(0, 1) for part in rows)
    after, _ = jax.lax.scan(one, before_block(state, slots, lengths), along)
    return put(state, slots, after, counts)


def delta_prefill(
    query: Float[Array, "batch width key_heads key_dim"],
    key: Float[Array, "batch width key_heads key_dim"],
    value: Float[Array, "batch width value_heads value_dim"],
    log_decay: Float[Array, "batch width value_heads"],
    beta: Float[Array, "batch width value_heads"],
    state: Float[Array, "slots value_heads key_dim value_dim"],
    slots: Int[Array, " batch"],
    lengths: Int[Array, " batch"],
    counts: Int[Array, " batch"],
) -> tuple[
    Float[Array, "batch width value_heads value_dim"],
    Float[Array, "batch value_heads key_dim value_dim"],
]:
    heads = value.shape[2]
    kept = jnp.arange(value.shape[1]) < counts[:, None]
    outputs, after = in_chunks(  # a row of zeros neither decays nor corrects a state
        or_zeros(scaled_queries(query, heads), kept),
        or_zeros(unit_keys(key, heads), kept),
        or_zeros(wide(value), kept),
        or_zeros(wide(log_decay), kept),
        or_zeros(wide(beta), kept),
        before_block(state, slots, lengths),
    )
    return outputs.astype(value.dtype), after


def or_zeros(
    part: Float[Array, "batch width ..."], taken: Bool[Array, "batch width"]
) -> Float[Array, "batch width ..."]:
    """The rows that are taken, and zeros in place of the others."""
    return jnp.where(taken.reshape(*taken.shape, *[1] * (part.ndim - 2)), part, 0)


def mixer_read(
    inputs: Float[Array, "batch width outputs"],
    tails: Float[Array, "slots recent channels"],
    taps: Float[Array, "taps channels"],
    decay_bias: Float[Array, " value_heads"],
    log_rate: Float[Array, " value_heads"],
    state: Float[Array, "slots value_heads key_dim value_dim"],
    slots: Int[Array, " batch"],
    lengths: Int[Array, " batch"],
) -> Float[Array, "batch width value_heads value_dim"]:
    rows = rows_in_slots(inputs, tails, taps, decay_bias, log_rate, state, slots, lengths)
    return delta_read(*rows, state, slots, lengths)


def mixer_fold(
    inputs: Float[Array, "batch width outputs"],
    tails: Float[Array, "slots recent channels"],
    taps: Float[Array, "taps channels"],
    decay_bias: Float[Array, " value_heads"],
    log_rate: Float[Array, " value_heads"],
    state: Float[Array, "slots value_heads key_dim value_dim"],
    slots: Int[Array, " batch"],
    lengths: Int[Array, " batch"],
    counts: Int[Array, " batch"],
) -> Float[Array, "slots value_heads key_dim value_dim"]:
    rows = rows_in_slots(inputs, tails, taps, decay_bias, log_rate, state, slots, lengths)
    return delta_fold(*rows[1:], state, slots, lengths, counts)


def rows_in_slots(
    inputs: Float[Array, "batch width outputs"],
    tails: Float[Array, "slots recent channels"],
    taps: Float[Array, "taps channels"],
    decay_bias: Float[Array, " value_heads"],
    log_rate: Float[Array, " value_heads"],
    state: Float[Array, "slots value_heads key_dim value_dim"],
    slots: Int[Array, " batch"],
    lengths: Int[Array, " batch"],
) -> Recurrent:
    """The rows of a block that follows the tails of its requests' slots."""
    before = before_block(tails, slots, lengths)
    return recurrent_rows(inputs, before, taps, decay_bias, log_rate, *state.shape[2:])


def after_row(
    state: State,
    key: Float[Array, "batch value_heads key_dim"],
    value: Float[Array, "batch value_heads value_dim"],
    log_decay: Float[Array, "batch value_heads"],
    beta: Float[Array, "batch value_heads"],
) -> State:
    """The states after one token of every request."""
    state = state * jnp.exp(log_decay)[..., None, None]
    answer = (state * key[..., None]).sum(axis=-2)
    correction = beta[..., None] * (value - answer)
    return state + key[..., None] * correction[..., None, :]


def before_block(
    of_slots: Shaped[Array, "slots ..."],
    slots: Int[Array, " batch"],
    lengths: Int[Array, " batch"],
) -> Shaped[Array, "batch ..."]:
    """The state of every request: zeros at the start of its text."""
    begun = lengths.reshape(-1, *[1] * (of_slots.ndim - 1)) > 0
    return jnp.where(begun, of_slots[slots], 0)


def put(
    of_slots: Shaped[Array, "slots ..."],
    slots: Int[Array, " batch"],
    after: Shaped[Array, "batch ..."],
    counts: Int[Array, " batch"],
) -> Shaped[Array, "slots ..."]:
    """The states of all slots, with new ones for the requests that kept something."""
    unused = of_slots.shape[0]
    return of_slots.at[jnp.where(counts > 0, slots, unused)].set(after, mode="drop")


def unit_keys(
    key: Float[Array, "batch width key_heads key_dim"], value_heads: int
) -> Float[Array, "batch width value_heads key_dim"]:
    """Keys of length 1, one for each value head."""
    key = wide(key)
    key = key * jax.lax.rsqrt((key * key).sum(axis=-1, keepdims=True) + EPS)
    return jnp.repeat(key, value_heads // key.shape[2], axis=2)


def scaled_queries(
    query: Float[Array, "batch width key_heads key_dim"], value_heads: int
) -> Float[Array, "batch width value_heads key_dim"]:
    return unit_keys(query, value_heads) * query.shape[-1] ** -0.5


def wide(x: Float[Array, "..."]) -> Float[Array, "..."]:
    return x.astype(jnp.float32)
