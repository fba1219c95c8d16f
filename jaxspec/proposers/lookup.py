"""Prompt lookup on the device, where the newest tokens are known before the host has read them."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxspec.layers.shards import Shards
from jaxspec.models.target import Target
from jaxspec.proposers.device import Committed, DraftInputs, Drafts, Params
from jaxspec.proposers.options import SpeculationOptions

History = Int[Array, "slots positions"]


@dataclasses.dataclass(frozen=True)
class Lookup:
    """Proposes what followed an earlier occurrence of the newest tokens, by the rules of
    `NgramIndex`.

    The state is the token at every position of every slot. Entries beyond a request's length may
    hold anything; they are overwritten before they are read.
    """

    most_continued: int
    """The most tokens that are proposed after a match."""
    num_drafts: int
    """How many drafts a step has room for. With `exact` these can be more than `most_continued`,
    because all methods then run programs of the same shapes."""
    min_ngram: int
    max_ngram: int
    match: str
    """Which of several occurrences to continue: recent or earliest."""
    look_back: int

    max_positions = None

    def with_shards(self, shards: Shards) -> "Lookup":
        """Returns itself: there is nothing to shard, and every device does the same lookup."""
        return self

    def new_state(self, num_slots: int, num_pages: int, page_size: int, positions: int) -> History:
        return jnp.zeros((num_slots, positions), jnp.int32)

    def propose(
        self,
        target: Target,
        params: Params,
        state: History,
        inputs: DraftInputs,
        *,
        width: int,
        drawn: bool,
    ) -> tuple[History, Drafts]:
        """The next state, and no more drafts than are wanted and fit into the request's budget."""
        state = state.at[inputs.slots, inputs.lengths].set(inputs.tokens, mode="drop")
        tokens, found = look_up(self, state[inputs.slots], inputs.lengths + 1)
        wanted = jnp.maximum(jnp.minimum(inputs.num_drafts, inputs.room), 0)
        return state, Drafts(tokens[:, : width - 1], jnp.minimum(found, wanted))

    def absorb(self, params: Params, state: History, committed: Committed) -> History:
        block = committed.block
        return state.at[block.slots[:, None], block.positions].set(committed.tokens, mode="drop")

    def recall(
        self,
        state: History,
        slot: Int[Array, ""],
        tokens: Int[Array, " positions"],
        count: Int[Array, ""],
    ) -> History:
        return state.at[slot].set(tokens)

    def bytes_read(self, params: Params, target_head: int) -> int:
        return 0


def lookup_of(options: SpeculationOptions, num_drafts: int) -> Lookup:
    return Lookup(
        min(options.drafts_of_lookup, num_drafts),
        num_drafts,
        options.min_ngram,
        options.max_ngram,
        options.ngram_match,
        options.ngram_look_back,
    )


def look_up(
    lookup: Lookup, tokens: Int[Array, "batch positions"], counts: Int[Array, " batch"]
) -> tuple[Int[Array, "batch drafts"], Int[Array, " batch"]]:
    """The tokens that followed an earlier occurrence of the longest possible suffix of each
    request's first `counts` tokens, and how many there are.

    tokens       x a b c d e . . . y a b c          counts = 13
    runs         . . . . 3 . . . . . . . .          the 3 tokens before d are also the last 3
    drafts               d e . . . y a b c          up to `most_continued` of them
    """
    positions = tokens.shape[1]
    runs = _runs(lookup, tokens, counts)
    at = jnp.arange(positions, dtype=jnp.int32)
    preferred = at if lookup.match == "recent" else positions - at
    best = jnp.argmax(jnp.where(runs >= lookup.min_ngram, runs, 0) * positions + preferred, axis=1)
    best = best.astype(jnp.int32)
    found = jnp.take_along_axis(runs, best[:, None], axis=1)[:, 0] >= lookup.min_ngram
    places = best[:, None] + jnp.arange(lookup.num_drafts, dtype=jnp.int32)
    drafts = jnp.take_along_axis(tokens, places, axis=1, mode="fill", fill_value=0)
    return drafts, jnp.where(found, jnp.minimum(counts - best, lookup.most_continued), 0)


def _runs(
    lookup: Lookup, tokens: Int[Array, "batch positions"], counts: Int[Array, " batch"]
) -> Int[Array, "batch positions"]:
    """For each position, how many tokens before it equal the request's last ones, up to
    `max_ngram`."""
    at, end = jnp.arange(tokens.shape[1], dtype=jnp.int32), counts[:, None]
    matching: Bool[Array, "batch positions"] = at < end
    runs = jnp.zeros_like(tokens)
    for back in range(1, lookup.max_ngram + 1):
        before = jnp.pad(tokens, ((0, 0), (back, 0)))[:, : tokens.shape[1]]
        last = jnp.take_along_axis(tokens, jnp.maximum(end - back, 0), axis=1)
        within = (at >= back) & (at - back >= end - lookup.look_back)
        matching &= (before == last) & within
        runs += matching
    return runs
