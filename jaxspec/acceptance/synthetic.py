"""Acceptance drawn at random instead of found by comparing drafts, to time an engine at a given
acceptance without weights that reach it. The output is then not the target's text."""

import dataclasses
import itertools
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from jaxspec.errors import UsageError

BISECTIONS = 60


@dataclasses.dataclass(frozen=True)
class SyntheticAcceptance:
    """The probability that each draft is accepted, given that all drafts before it were."""

    conditional_rates: tuple[int | float, ...]

    @property
    def mean_length(self) -> float:
        """Expected acceptance length: accepted drafts and the bonus token."""
        return 1.0 + sum(itertools.accumulate(self.conditional_rates, operator.mul))

    @property
    def rates(self) -> Float[np.ndarray, " drafts"]:
        """The rates as the steps read them, on the host."""
        return np.array(self.conditional_rates, np.float32)


@dataclasses.dataclass(frozen=True)
class MixedAcceptance:
    """Several kinds of requests: a request with seed s is of kind s modulo the number of kinds."""

    kinds: tuple[SyntheticAcceptance, ...]

    @property
    def mean_length(self) -> float:
        """The mean over all kinds, as if they took the same number of steps."""
        return sum(kind.mean_length for kind in self.kinds) / len(self.kinds)

    @property
    def rates(self) -> Float[np.ndarray, "kinds drafts"]:
        """The rates as the steps read them, on the host."""
        return np.array([kind.conditional_rates for kind in self.kinds], np.float32)


def from_rates(rates: Sequence[int | float], num_drafts: int) -> SyntheticAcceptance:
    """From the share of steps that accept the draft at each place; 0 for places beyond `rates`."""
    falling = all(a >= b for a, b in itertools.pairwise((1.0, *rates, 0.0)))
    if not (0 < len(rates) <= num_drafts and falling):
        raise UsageError(
            f"synthetic acceptance rates {tuple(rates)}; expected 1 to {num_drafts} numbers "
            "in [0, 1], none larger than the one before"
        )
    padded = (*rates, *[0.0] * (num_drafts - len(rates)))
    pairs = itertools.pairwise((1.0, *padded))
    return SyntheticAcceptance(tuple(b / a if a else 0.0 for a, b in pairs))


def from_length(length: int | float, num_drafts: int) -> SyntheticAcceptance:
    """From the mean acceptance length, bonus token counted: one rate for all places."""
    if not 1 <= length <= num_drafts + 1:
        raise UsageError(
            f"synthetic acceptance length {length}; expected 1 to {num_drafts + 1}, the "
            f"tokens that a step with {num_drafts} drafts can emit"
        )
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        rate = (low + high) / 2
        too_low = sum(rate**place for place in range(num_drafts + 1)) < length
        low, high = (rate, high) if too_low else (low, rate)
    return SyntheticAcceptance((high,) * num_drafts)


def draw_accepted(
    rates: Float[Array, " drafts"] | Float[Array, "kinds drafts"],
    seeds: UInt32[Array, " batch"],
    lengths: Int[Array, " batch"],
    num_drafts: Int[Array, " batch"],
) -> Int[Array, " batch"]:
    """Number of accepted drafts per request, drawn at conditional rates. The same seed and length
    give the same draw. The rates are data, so one program serves all rates."""
    of_request = rates if rates.ndim == 1 else rates[seeds % rates.shape[0]]

    def luck(seed: UInt32[Array, ""], length: Int[Array, ""]) -> Float[Array, " drafts"]:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), seed), length)
        return jax.random.uniform(key, rates.shape[-1:])

    places = rates.shape[-1]
    drafted = jnp.arange(places)[None, :] < num_drafts[:, None]
    accepted = (jax.vmap(luck)(seeds, lengths) < of_request) & drafted
    return jnp.cumprod(accepted.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
