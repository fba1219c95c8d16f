"""Sampling of every token of a step with its request's own parameters and its own key."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, UInt32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotSampling:
    """Sampling parameters: an entry per slot or request of a batch; scalars for a single one."""

    temperature: Float[Array, "*slots"]
    """Temperature; 0 takes the most likely token."""
    top_k: Int[Array, "*slots"]
    """Number of most likely tokens that are kept; 0 keeps all."""
    top_p: Float[Array, "*slots"]
    """Probability mass of the most likely tokens that are kept, after top_k; 1 keeps all."""
    min_p: Float[Array, "*slots"]
    """Tokens less likely than this share of the most likely one are dropped; 0 keeps all."""
    seed: UInt32[Array, "*slots"]
    """Seed. With the token's position it makes the key of a draw, which depends on nothing else."""

    def of(self, slots: Int[Array, " batch"]) -> "SlotSampling":
        return jax.tree.map(lambda entries: entries[slots], self)


INDEPENDENT = 0
"""Purpose of drawing a token of the target independently of any draft."""


def key_at(seed: UInt32[Array, ""], position: Int[Array, ""], purpose: int) -> Key[Array, ""]:
    """The key of one draw, which depends only on these arguments."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), position), purpose)


def sample(
    logits: Float[Array, "batch width vocab"],
    sampling: SlotSampling,
    positions: Int[Array, "batch width"],
) -> Int[Array, "batch width"]:
    """The token at each of `positions`, drawn for requests with a temperature. If no request has a
    temperature, the same program neither sorts nor draws."""
    hot, likeliest = sampling.temperature[:, None] > 0, greedy(logits)
    draw = lambda: jnp.where(hot, _draw(logits, sampling, positions), likeliest)
    return jax.lax.cond(jnp.any(hot), draw, lambda: likeliest)


def greedy(logits: Float[Array, "batch width vocab"]) -> Int[Array, "batch width"]:
    """The likeliest token at every position; the first one if several are equally likely."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _draw(
    logits: Float[Array, "batch width vocab"],
    sampling: SlotSampling,
    positions: Int[Array, "batch width"],
) -> Int[Array, "batch width"]:
    def draw(
        logits: Float[Array, " vocab"], sampling: SlotSampling, position: Int[Array, ""]
    ) -> Int[Array, ""]:
        key = key_at(sampling.seed, position, INDEPENDENT)
        return jax.random.categorical(key, filtered(logits, sampling)).astype(jnp.int32)

    over_width = jax.vmap(draw, in_axes=(0, None, 0))
    return jax.vmap(over_width)(logits, sampling, positions)


def filtered(logits: Float[Array, " vocab"], sampling: SlotSampling) -> Float[Array, " vocab"]:
    """Logits divided by the temperature, with minus infinity for tokens that the filters drop."""
    scaled = logits.astype(jnp.float32) / jnp.maximum(sampling.temperature, 1e-6)
    ordered = jnp.sort(scaled, descending=True)
    rank = jnp.arange(ordered.size)
    kept = (rank < sampling.top_k) | (sampling.top_k == 0)
    mass = jax.nn.softmax(jnp.where(kept, ordered, -jnp.inf))
    # A token is kept if the mass before it is below top_p, so the token that crosses top_p is kept.
    # The first is kept although 32-bit floats flush a tiny top_p to zero, and a top_p of one keeps
    # all although their sum may be rounded up to one before the last token.
    exempt = (rank == 0) | (sampling.top_p >= 1)
    kept &= (jnp.cumsum(mass) - mass < sampling.top_p) | exempt
    kept &= ordered >= ordered[0] + jnp.log(sampling.min_p)
    least = jnp.min(jnp.where(kept, ordered, jnp.inf))
    return jnp.where(scaled >= least, scaled, -jnp.inf)
