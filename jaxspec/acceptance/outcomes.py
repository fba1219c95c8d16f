"""Estimates how likely a request's drafts are accepted, from what its last steps accepted; for
numpy and jax arrays alike.

For every request and each place in the block, it counts how often a draft was tried (verified, with
all drafts before it accepted) and how often it was kept. Older steps count less. Few tries say
little, so each rate is mixed with a more general rate, from more tries:

    all requests, all places  ->  all requests, each place       from the first place to the last
    all requests, each place  ->  one request, each place        as much likelier as the request is
    one request, each place   ->  its own tries at that place
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

Numbers = jax.Array | np.ndarray

MEMORY = 0.9
"""Weight of a step relative to the next one."""
FIRST_RATE = 0.8
"""The rate before anything is known."""
TRIES_OF_ALL, TRIES_OF_A_PLACE, TRIES_OF_A_REQUEST, TRIES_OF_ITS_PLACE = 8.0, 8.0, 16.0, 16.0
"""How many tries the more general rate counts for when it is mixed into the rate over everything,
at one place, of one request, and at one of its places."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outcomes:
    """How many drafts of each request were tried and kept at each place."""

    tried: Float[Numbers, "slots drafts"]
    """Drafts that were verified after all drafts before them had been accepted."""
    kept: Float[Numbers, "slots drafts"]
    """How many of these were accepted."""


def no_outcomes(slots: int, drafts: int) -> Outcomes:
    """The outcomes of requests that have drafted nothing yet, on the device."""
    return Outcomes(*(jnp.zeros((slots, drafts), jnp.float32) for _ in range(2)))


def after_step(
    tried: Float[Numbers, "batch drafts"],
    kept: Float[Numbers, "batch drafts"],
    num_drafts: Int[Numbers, " batch"],
    accepted: Int[Numbers, " batch"],
) -> tuple[Float[Numbers, "batch drafts"], Float[Numbers, "batch drafts"]]:
    """`tried` and `kept` after a step; nothing changes for requests without drafts in it."""
    xp = tried.__array_namespace__()
    place = xp.arange(tried.shape[1])[None, :]
    is_kept = place < accepted[:, None]
    is_tried = (place <= accepted[:, None]) & (place < num_drafts[:, None])
    memory = xp.where(num_drafts[:, None] > 0, MEMORY, 1.0)
    new_tried = memory * tried + is_tried
    new_kept = memory * kept + is_kept
    return xp.astype(new_tried, tried.dtype), xp.astype(new_kept, kept.dtype)


def survival(
    tried: Float[Numbers, "batch drafts"], kept: Float[Numbers, "batch drafts"]
) -> Float[Numbers, "batch drafts"]:
    """The chance that a draft and all drafts before it are accepted."""
    return tried.__array_namespace__().cumulative_prod(chances(tried, kept), axis=1)


def chances(
    tried: Float[Numbers, "batch drafts"], kept: Float[Numbers, "batch drafts"]
) -> Float[Numbers, "batch drafts"]:
    """The chance that a draft is accepted if all drafts before it are."""
    xp = tried.__array_namespace__()
    of_all = rate(kept.sum(), tried.sum(), FIRST_RATE, TRIES_OF_ALL)
    of_places = _of_places(xp, tried.sum(axis=0), kept.sum(axis=0), of_all)
    expected = (tried * of_places).sum(axis=1)
    likelier = log_odds(
        xp, rate(kept.sum(axis=1), tried.sum(axis=1), of_all, TRIES_OF_A_REQUEST)
    ) - log_odds(xp, rate(expected, tried.sum(axis=1), of_all, TRIES_OF_A_REQUEST))
    of_request = 1 / (1 + xp.exp(-log_odds(xp, of_places) - likelier[:, None]))
    return rate(kept, tried, of_request, TRIES_OF_ITS_PLACE)


def _of_places(xp: Any, tried: Any, kept: Any, of_all: Any) -> Any:
    """The rate of every place over all requests, mixed with the rate of the place before."""
    rates, before = [], of_all
    for place in range(tried.shape[0]):
        before = rate(kept[place], tried[place], before, TRIES_OF_A_PLACE)
        rates.append(before)
    return xp.stack(rates)


def rate(kept: Any, tried: Any, prior: Any, tries: float) -> Any:
    """The share that was kept, mixed with the rate `prior`, which counts for `tries` tries."""
    return (kept + tries * prior) / (tried + tries)


def log_odds(xp: Any, chance: Any) -> Any:
    """log(chance / (1 - chance)). On this scale a chance can be raised or lowered by adding."""
    inside = xp.clip(chance, 1e-3, 1 - 1e-3)
    return xp.log(inside / (1 - inside))
