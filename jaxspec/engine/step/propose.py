"""Steps that propose a block: by the drafter, the host, or what a request said before."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.cache.block import Block
from jaxspec.engine.step.io import Drafts, Models, Params
from jaxspec.engine.step.rows import active, block_of
from jaxspec.engine.step.state import EngineState
from jaxspec.proposers import dflash
from jaxspec.proposers.lookup import Lookup, look_up


def draft_step(
    models: Models,
    params: Params,
    state: EngineState,
    slots: Int[Array, " rows"],
    *,
    width: int | None = None,
) -> tuple[EngineState, Int[Array, "rows drafts"]]:
    """A block of drafts for every row, cut to what a step of `width` verifies. Writes scratch rows
    into the drafter's pool."""
    with jax.named_scope("draft"):
        block = _block_to_draft(models, state, slots)
        drafts, pool = dflash.propose(
            models.target, models.drafter, params, state.last_tokens[slots], block, state.draft_pool
        )
        return dataclasses.replace(state, draft_pool=pool), drafts[:, : _places(models, width)]


def drawn_draft_step(
    models: Models,
    params: Params,
    state: EngineState,
    slots: Int[Array, " rows"],
    *,
    width: int | None = None,
) -> tuple[EngineState, tuple[Int[Array, "rows drafts"], Float[Array, "rows drafts vocab"]]]:
    """`draft_step` for batches in which somebody samples: drafts are drawn as requests ask.
    Also gives the logits they were drawn from."""
    with jax.named_scope("draft"):
        block = _block_to_draft(models, state, slots)
        drafts, logits, pool = dflash.propose_drawn(
            models.target,
            models.drafter,
            params,
            state.last_tokens[slots],
            block,
            state.draft_pool,
            state.sampling.of(slots),
        )
        places = _places(models, width)
        return dataclasses.replace(state, draft_pool=pool), (drafts[:, :places], logits[:, :places])


def replace_step(
    models: Models,
    params: Params,
    state: EngineState,
    drafts: Int[Array, "rows drafts"],
    num_drafts: Int[Array, " rows"],
    proposed: Int[Array, "rows drafts"],
    num_proposed: Int[Array, " rows"],
    logits: Float[Array, "rows drafts vocab"] | None = None,
) -> tuple[EngineState, Drafts]:
    """The host's drafts for rows where it proposed some; drawn by nobody, so certain."""
    mine = num_proposed > 0
    replaced = jnp.where(mine[:, None], proposed, drafts)
    if logits is not None:
        chosen = jnp.arange(logits.shape[-1]) == proposed[..., None]
        certain = jnp.where(chosen, 0.0, -jnp.inf).astype(logits.dtype)
        logits = jnp.where(mine[:, None, None], certain, logits)
    return state, Drafts(replaced, jnp.where(mine, num_proposed, num_drafts), logits)


def lookup_step(
    models: Models,
    params: Params,
    state: EngineState,
    slots: Int[Array, " rows"],
    num_drafts: Int[Array, " rows"],
    *,
    lookup: Lookup,
) -> tuple[EngineState, Drafts]:
    """What the tokens of every row go on with, `num_drafts` at most and none beyond its budget."""
    with jax.named_scope("draft"):
        lengths = state.lengths[slots]
        drafts, found = look_up(lookup, state.tokens[slots], lengths + 1)
        room = jnp.minimum(num_drafts, state.limits[slots] - lengths - 1)
        return state, Drafts(drafts, jnp.clip(found, 0, jnp.maximum(room, 0)))


def _block_to_draft(models: Models, state: EngineState, slots: Int[Array, " rows"]) -> Block:
    block_size = models.drafter.config.block_size
    return block_of(state, slots, active(state, slots) * block_size, block_size)


def _places(models: Models, width: int | None) -> int:
    return (models.drafter.config.block_size if width is None else width) - 1
