"""The engine's state on the device, as one record.

One slot, with drafts d1..d3, of which d1 and d2 turn out right:

    position     0 ................ length-1 | length   +1   +2   +3
    tokens       prompt, output so far       | last     d1   d2   d3      last: emitted, its key
    target cache keys and values             | written by verify ......   and value not yet kept
    drafter      context from features       | scratch of the draft block
    commit       length += 3, last = the target's token after d2
    target cache ................................................ | d3's: stale
    drafter      context from features .......................... | scratch: stale

Invariants, true between steps:
  - positions [0, length) of a slot are committed: the target's cache and the state of every
    proposer hold their entries for those tokens; all caches use the same page ids, so one page
    table serves them all;
  - the token at position `length` is `last_tokens[slot]`; it is in no cache;
  - pages hold stale entries from position `length` on: they may hold anything, NaN included, and
    are overwritten before they are read. So keys and values are rolled back by not advancing
    `length`. What a recurrent layer keeps per slot changes only in `commit`;
  - page 0 is the trash page: entries of padding are written there, and it is never read;
  - a slot with length >= limit takes part in no step, even if it is in the step's batch.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxspec.acceptance.outcomes import Outcomes, no_outcomes
from jaxspec.acceptance.scores import Scores, no_scores
from jaxspec.cache.block import Block, block_after
from jaxspec.cache.cache import Cache
from jaxspec.engine.step.io import Models
from jaxspec.sampling import SlotSampling


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EngineState:
    """Everything that a step reads and returns. The last slot is never given to a request: it is
    the padding slot, for batches with fewer requests than their size."""

    cache: Cache
    """The target's cache. If states are saved, the arrays with a row per slot have further rows for
    these, after those of the slots."""
    proposers: tuple[Any, ...]
    """The state of each of `Models.proposers`."""
    page_table: Int[Array, "slots max_pages"]
    """Pages of every slot by position // page_size; 0 if none is held."""
    lengths: Int[Array, " slots"]
    """Committed tokens of every slot."""
    limits: Int[Array, " slots"]
    """Length at which a slot's budget is spent; 0 for a slot without a request."""
    last_tokens: Int[Array, " slots"]
    """The newest token of every slot, emitted but not yet in the caches."""
    sampling: SlotSampling
    """Sampling parameters of every slot."""
    outcomes: Outcomes | None = None
    """Outcomes of the drafts of every slot's request; None unless steps share out their tokens."""
    scores: Scores | None = None
    """The drafter's own probabilities of its drafts, and how often drafts with such probabilities
    were accepted; None unless steps share out their tokens."""

    def active(self, slots: Int[Array, " batch"]) -> Int[Array, " batch"]:
        """1 for slots with budget left, else 0."""
        return (self.lengths[slots] < self.limits[slots]).astype(jnp.int32)

    def block(
        self, slots: Int[Array, " batch"], counts: Int[Array, " batch"], width: int, page_size: int
    ) -> Block:
        """The `width` positions after the committed ones, of which the first `counts` are kept."""
        table = self.page_table[slots]
        return block_after(slots, self.lengths[slots], counts, table, width, page_size)


def occupied(state: EngineState, batch: int, context: int, limit: int) -> EngineState:
    """A state for timing single steps: `batch` slots are in the middle of a generation, each with
    `context` committed tokens and budget up to `limit`, and the others are empty. Slots share pages
    if there are not enough for all. The contents of the caches are left as they are."""
    slots, max_pages = state.page_table.shape
    num_pages = (state.cache.num_pages or 2) - 1
    in_use = np.arange(slots) < batch
    pages = 1 + np.arange(slots * max_pages).reshape(slots, max_pages) % num_pages
    table, lengths, limits = jax.device_put(
        (
            np.where(in_use[:, None], pages, 0).astype(np.int32),
            np.where(in_use, context, 0).astype(np.int32),
            np.where(in_use, limit, 0).astype(np.int32),
        )
    )
    return dataclasses.replace(state, page_table=table, lengths=lengths, limits=limits)


# This is one program because a signal in the middle of a single operation of JAX can leave JAX
# without its tracing state, and then single operations fail in this process. Programs and uploads
# still work, and steps use nothing else.
@partial(
    jax.jit,
    static_argnames=(
        "models",
        "num_slots",
        "num_pages",
        "max_pages",
        "positions",
        "num_drafts",
        "num_snapshots",
    ),
)
def empty_state(
    models: Models,
    num_slots: int,
    num_pages: int,
    max_pages: int,
    positions: int,
    num_drafts: int | None = None,
    num_snapshots: int = 0,
) -> EngineState:
    """A state without requests: `num_slots` slots and the padding slot, caches of `num_pages`
    pages, and room for `num_snapshots` saved states; with `num_drafts`, also outcomes and scores of
    so many drafts per step."""
    slots = num_slots + 1
    integers = lambda: jnp.zeros(slots, jnp.int32)
    floats = lambda: jnp.zeros(slots, jnp.float32)
    return EngineState(
        cache=models.target.new_cache(slots + num_snapshots, num_pages, models.page_size),
        proposers=tuple(
            proposer.new_state(slots, num_pages, models.page_size, positions)
            for proposer in models.proposers
        ),
        page_table=jnp.zeros((slots, max_pages), jnp.int32),
        lengths=integers(),
        limits=integers(),
        last_tokens=integers(),
        sampling=SlotSampling(
            temperature=floats(),
            top_k=integers(),
            top_p=floats() + 1,
            min_p=floats(),
            seed=jnp.zeros(slots, jnp.uint32),
        ),
        outcomes=None if num_drafts is None else no_outcomes(slots, num_drafts),
        scores=None if num_drafts is None else no_scores(slots, num_drafts),
    )
