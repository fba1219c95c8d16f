"""Prompt lookup on the device, which has the newest tokens before the host has read them."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxspec.proposers.options import SpeculationOptions


@dataclasses.dataclass(frozen=True)
class Lookup:
    """What is looked for; the rules are those of `NgramIndex`."""

    num_drafts: int
    """What is found is continued by so many tokens at most."""
    places: int
    """Drafts that a step has room for: with `exact` more, so that its programs stay the same."""
    min_ngram: int
    max_ngram: int
    match: str
    """Which of several occurrences: recent or earliest."""
    look_back: int


def lookup_of(options: SpeculationOptions, places: int) -> Lookup:
    return Lookup(
        min(options.num_drafts, places),
        places,
        options.min_ngram,
        options.max_ngram,
        options.ngram_match,
        options.ngram_look_back,
    )


def look_up(
    lookup: Lookup, tokens: Int[Array, "rows positions"], counts: Int[Array, " rows"]
) -> tuple[Int[Array, "rows drafts"], Int[Array, " rows"]]:
    """What followed the longest suffix of every row's first `counts` tokens, and how much of it.

    tokens       x a b c d e . . . y a b c          counts = 13
    runs         . . . . 3 . . . . . . . .          3 tokens before d are the last 3
    drafts               d e . . . y a b c          up to `num_drafts` of them
    """
    rows, positions = tokens.shape
    runs = _runs(lookup, tokens, counts)
    at = jnp.arange(positions, dtype=jnp.int32)
    preferred = at if lookup.match == "recent" else positions - at
    best = jnp.argmax(jnp.where(runs >= lookup.min_ngram, runs, 0) * positions + preferred, axis=1)
    best = best.astype(jnp.int32)
    found = jnp.take_along_axis(runs, best[:, None], axis=1)[:, 0] >= lookup.min_ngram
    places = best[:, None] + jnp.arange(lookup.places, dtype=jnp.int32)
    drafts = jnp.take_along_axis(tokens, places, axis=1, mode="fill", fill_value=0)
    return drafts, jnp.where(found, jnp.minimum(counts - best, lookup.num_drafts), 0)


def _runs(
    lookup: Lookup, tokens: Int[Array, "rows positions"], counts: Int[Array, " rows"]
) -> Int[Array, "rows positions"]:
    """Before every position how many tokens, `max_ngram` at most, are the row's last ones."""
    at, end = jnp.arange(tokens.shape[1], dtype=jnp.int32), counts[:, None]
    going_on: Bool[Array, "rows positions"] = at < end
    runs = jnp.zeros_like(tokens)
    for back in range(1, lookup.max_ngram + 1):
        before = jnp.pad(tokens, ((0, 0), (back, 0)))[:, : tokens.shape[1]]
        last = jnp.take_along_axis(tokens, jnp.maximum(end - back, 0), axis=1)
        within = (at >= back) & (at - back >= end - lookup.look_back)
        going_on &= (before == last) & within
        runs += going_on
    return runs
