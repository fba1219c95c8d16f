"""The device side of the engine, as one value.

One slot, drafts d1..d3, of which d1 and d2 turn out right:

    position     0 ................ length-1 | length   +1   +2   +3
    tokens       prompt, output so far       | last     d1   d2   d3      last: emitted, its key
    target pool  keys and values             | written by verify ......   and value not yet kept
    drafter pool context from features       | scratch of the draft block
    commit       length += 3, last = the target's token after d2
    target pool  ................................................ | d3's row: stale
    drafter pool context from features .......................... | scratch: stale

Invariants, true between steps:
  - rows [0, length) of a slot hold the target's keys and values of its tokens, and the drafter's
    context of the same tokens; both pools use the same page ids, so one page table serves both;
  - the token at position `length` is `last_token`; it is in neither pool;
  - rows from `length` on are stale: they may hold anything, NaN included, and are overwritten
    before they are read. Rolling back is therefore nothing but not advancing `length`;
  - page 0 is the trash page: rows that nobody keeps are written there, and nobody reads it;
  - a slot with length >= limit takes part in no step, whatever program it rides in.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.cache.cache import Cache
from jaxspec.sampling import SlotSampling


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EngineState:
    """Everything that a step reads and returns. The last slot is nobody's: it pads batches."""

    target_pool: Cache
    """The target's pages."""
    draft_pool: Cache | None
    """The drafter's pages, of its own geometry; None without a drafter."""
    page_table: Int[Array, "slots max_pages"]
    """Pages of every slot by position // page_size; 0 where none is held."""
    lengths: Int[Array, " slots"]
    """Committed rows of every slot."""
    limits: Int[Array, " slots"]
    """Length at which a slot's budget is spent; 0 for a slot that nobody has."""
    last_tokens: Int[Array, " slots"]
    """The newest token of every slot, emitted but not yet in the pools."""
    tokens: Int[Array, "slots positions"] | None
    """Token of every position up to `length`, that one included; None where nobody looks up."""
    sampling: SlotSampling
    """How every slot's tokens are drawn."""

    page_size: int = dataclasses.field(metadata={"static": True})
    """Positions of a page."""


def empty_state(
    target_pool: Cache,
    draft_pool: Cache | None,
    num_slots: int,
    max_pages: int,
    page_size: int,
    positions: int = 0,
) -> EngineState:
    """A state with nobody in it; one slot more than asked for, the padding slot. Of as many
    positions the tokens are kept."""
    integers = lambda: jnp.zeros(num_slots + 1, jnp.int32)
    floats = lambda: jnp.zeros(num_slots + 1, jnp.float32)
    return EngineState(
        target_pool=target_pool,
        draft_pool=draft_pool,
        page_table=jnp.zeros((num_slots + 1, max_pages), jnp.int32),
        lengths=integers(),
        limits=integers(),
        last_tokens=integers(),
        tokens=jnp.zeros((num_slots + 1, positions), jnp.int32) if positions else None,
        sampling=SlotSampling(
            temperature=floats(),
            top_k=integers(),
            top_p=floats() + 1,
            min_p=floats(),
            seed=jnp.zeros(num_slots + 1, jnp.uint32),
        ),
        page_size=page_size,
    )
