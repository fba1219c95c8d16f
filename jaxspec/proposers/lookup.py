"""Prompt lookup on the device, which has the newest tokens before the host has read them."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxspec.proposers.options import SpeculationOptions


@dataclasses.dataclass(frozen=True)
class Lookup:
    """What to look for; the rules are those of `NgramIndex`."""

    num_drafts: int
    """Most tokens to propose."""
    room: int
    """Drafts that a step has room for: more than `num_drafts` with `exact`, so that the programs
    stay the same."""
    min_ngram: int
    max_ngram: int
    match: str
    """Which of several occurrences to continue: recent or earliest."""
    look_back: int


def lookup_of(options: SpeculationOptions, room: int) -> Lookup:
    return Lookup(
        min(options.num_drafts, room),
        room,
        options.min_ngram,
        options.max_ngram,
        options.ngram_match,
        options.ngram_look_back,
    )


def look_up(
    lookup: Lookup, tokens: Int[Array, "batch positions"], counts: Int[Array, " batch"]
) -> tuple[Int[Array, "batch drafts"], Int[Array, " batch"]]:
    """For every request, the tokens that followed an earlier occurrence of the longest possible
    suffix of its first `counts` tokens; and how many of them are drafts.

    tokens       x a b c d e . . . y a b c          counts = 13
    runs         . . . . 3 . . . . . . . .          3 tokens before d are the last 3
    drafts               d e . . . y a b c          up to `num_drafts` of them
    """
    positions = tokens.shape[1]
    runs = _runs(lookup, tokens, counts)
    position = jnp.arange(positions, dtype=jnp.int32)
    preferred = position if lookup.match == "recent" else positions - position
    long_enough = jnp.where(runs >= lookup.min_ngram, runs, 0)
    best = jnp.argmax(long_enough * positions + preferred, axis=1).astype(jnp.int32)
    occurred = jnp.take_along_axis(runs, best[:, None], axis=1)[:, 0] >= lookup.min_ngram
    followers = best[:, None] + jnp.arange(lookup.room, dtype=jnp.int32)
    drafts = jnp.take_along_axis(tokens, followers, axis=1, mode="fill", fill_value=0)
    return drafts, jnp.where(occurred, jnp.minimum(counts - best, lookup.num_drafts), 0)


def _runs(
    lookup: Lookup, tokens: Int[Array, "batch positions"], counts: Int[Array, " batch"]
) -> Int[Array, "batch positions"]:
    """How many tokens before every position, `max_ngram` at most, equal the request's last ones."""
    position, end = jnp.arange(tokens.shape[1], dtype=jnp.int32), counts[:, None]
    equal_so_far: Bool[Array, "batch positions"] = position < end
    runs = jnp.zeros_like(tokens)
    for back in range(1, lookup.max_ngram + 1):
        before = jnp.pad(tokens, ((0, 0), (back, 0)))[:, : tokens.shape[1]]
        last = jnp.take_along_axis(tokens, jnp.maximum(end - back, 0), axis=1)
        within = (position >= back) & (position - back >= end - lookup.look_back)
        equal_so_far &= (before == last) & within
        runs += equal_so_far
    return runs
