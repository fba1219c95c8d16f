"""Sampling of every row of a step with its own parameters and its own key."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, UInt32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotSampling:
    """One entry per slot; scalars for one slot alone."""

    temperature: Float[Array, "*slots"]
    """0 takes the most likely token."""
    top_k: Int[Array, "*slots"]
    """Tokens kept by rank; 0 keeps all."""
    top_p: Float[Array, "*slots"]
    """Mass kept, most likely first, after top_k; 1 keeps all."""
    min_p: Float[Array, "*slots"]
    """Tokens less likely than this share of the most likely one are dropped; 0 keeps all."""
    seed: UInt32[Array, "*slots"]
    """With the token's position it makes the key, so a draw depends on nothing else."""

    def of(self, slots: Int[Array, " rows"]) -> "SlotSampling":
        return jax.tree.map(lambda entries: entries[slots], self)


ALONE = 0
"""A token of the target, drawn without a draft beside it."""


def key_at(seed: UInt32[Array, ""], position: Int[Array, ""], purpose: int) -> Key[Array, ""]:
    """Of one draw; nothing else decides it."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), position), purpose)


def sample(
    logits: Float[Array, "slots width vocab"],
    rows: SlotSampling,
    positions: Int[Array, "slots width"],
) -> Int[Array, "slots width"]:
    """The token at each of `positions`, drawn for rows with a temperature. Where no row has one,
    nothing is sorted and nothing drawn, though the program is the same."""
    hot, likeliest = rows.temperature[:, None] > 0, greedy(logits)
    draw = lambda: jnp.where(hot, _draw(logits, rows, positions), likeliest)
    return jax.lax.cond(jnp.any(hot), draw, lambda: likeliest)


def greedy(logits: Float[Array, "slots width vocab"]) -> Int[Array, "slots width"]:
    """The likeliest token of every row; the first of several."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _draw(
    logits: Float[Array, "slots width vocab"],
    rows: SlotSampling,
    positions: Int[Array, "slots width"],
) -> Int[Array, "slots width"]:
    def draw(
        logits: Float[Array, " vocab"], row: SlotSampling, position: Int[Array, ""]
    ) -> Int[Array, ""]:
        key = key_at(row.seed, position, ALONE)
        return jax.random.categorical(key, filtered(logits, row)).astype(jnp.int32)

    over_width = jax.vmap(draw, in_axes=(0, None, 0))
    return jax.vmap(over_width)(logits, rows, positions)


def filtered(logits: Float[Array, " vocab"], row: SlotSampling) -> Float[Array, " vocab"]:
    """Logits over the temperature, minus infinity where the row's filters drop the token."""
    scaled = logits.astype(jnp.float32) / jnp.maximum(row.temperature, 1e-6)
    ordered = jnp.sort(scaled, descending=True)
    rank = jnp.arange(ordered.size)
    kept = (rank < row.top_k) | (row.top_k == 0)
    mass = jax.nn.softmax(jnp.where(kept, ordered, -jnp.inf))
    # A token stays while the mass before it is short of top_p: the one that crosses it stays.
    kept &= jnp.cumsum(mass) - mass < row.top_p
    kept &= ordered >= ordered[0] + jnp.log(row.min_p)
    least = jnp.min(jnp.where(kept, ordered, jnp.inf))
    return jnp.where(scaled >= least, scaled, -jnp.inf)
