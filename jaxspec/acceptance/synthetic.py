"""Acceptance drawn instead of found, to time an engine at a given acceptance without the weights
that would reach it. What comes out is not the target's text."""

import dataclasses
import itertools
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxspec.errors import UsageError

BISECTIONS = 60


@dataclasses.dataclass(frozen=True)
class SyntheticAcceptance:
    """How likely each draft is accepted once all before it were."""

    conditional_rates: tuple[int | float, ...]

    @property
    def mean_length(self) -> float:
        """Of the steps that these rates are drawn for, bonus token counted."""
        return 1.0 + sum(itertools.accumulate(self.conditional_rates, operator.mul))

    @property
    def on_device(self) -> Float[Array, " places"]:
        """As the steps read it."""
        return jax.device_put(np.array(self.conditional_rates, np.float32))


def from_rates(rates: Sequence[int | float], places: int) -> SyntheticAcceptance:
    """From the share of steps that accept the draft at each place; places not named accept none."""
    falling = all(a >= b for a, b in itertools.pairwise((1.0, *rates, 0.0)))
    if not (0 < len(rates) <= places and falling):
        raise UsageError(
            f"synthetic acceptance rates {tuple(rates)}; expected 1 to {places} numbers in [0, 1], "
            "none larger than the one before"
        )
    padded = (*rates, *[0.0] * (places - len(rates)))
    pairs = itertools.pairwise((1.0, *padded))
    return SyntheticAcceptance(tuple(b / a if a else 0.0 for a, b in pairs))


def from_length(length: int | float, places: int) -> SyntheticAcceptance:
    """From the mean acceptance length, bonus token counted: one rate for all places."""
    if not 1 <= length <= places + 1:
        raise UsageError(
            f"synthetic acceptance length {length}; expected 1 to {places + 1}, the tokens that a "
            f"step with {places} drafts can give"
        )
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        rate = (low + high) / 2
        too_low = sum(rate**place for place in range(places + 1)) < length
        low, high = (rate, high) if too_low else (low, rate)
    return SyntheticAcceptance((high,) * places)


def draw_accepted(
    rates: Float[Array, " places"],
    seeds: Array,
    lengths: Int[Array, " rows"],
    num_drafts: Int[Array, " rows"],
) -> Int[Array, " rows"]:
    """Drafts accepted per row at conditional rates: the same for the same seed and committed
    length. The rates are data, so that one program serves all of them."""

    def row(seed: Array, length: Array) -> Bool[Array, " places"]:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), seed), length)
        return jax.random.uniform(key, rates.shape) < rates

    drafted = jnp.arange(rates.size)[None, :] < num_drafts[:, None]
    kept = jax.vmap(row)(seeds, lengths) & drafted
    return jnp.cumprod(kept.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
