"""The steps: pure functions of models, parameters, state and inputs.

    prefill_step              a chunk of prompts in, keys, values and context written
    draft_step                the drafter proposes a block; drawn_draft_step draws it
    verify_step               the target reads current token and drafts in one forward
    commit_step               accepted rows become context, lengths advance; the rest is rolled
                              back by not being counted
    spec_step                 draft, verify, accept and commit in one program
    replace_step              what the host proposes, in place of the drafter's drafts
    lookup_step               prompt lookup, in the drafter's place; lookup_spec_step is the whole

Plain decoding is a verify without drafts. True lengths are data, never shapes: a step is compiled
once for a number of rows and a width, and once more with `draws`, for batches in which somebody
samples or wants log probabilities.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.acceptance import accept, draw_accepted
from jaxspec.cache.block import Block, block_after
from jaxspec.engine.records import Drafts, Models, Params, PromptChunk, Seat, StepResult, Verified
from jaxspec.engine.state import EngineState
from jaxspec.proposers import dflash
from jaxspec.proposers.lookup import Lookup, look_up
from jaxspec.sampling import (
    TopLogprobs,
    greedy,
    sample,
    sample_beside_drafts,
    top_logprobs,
)


def prefill_step(
    models: Models, params: Params, state: EngineState, chunk: PromptChunk, *, draws: bool
) -> tuple[EngineState, StepResult]:
    """Reads a chunk of every row's prompt; the token after it counts where the prompt ends."""
    with jax.named_scope("prefill"):
        table = state.page_table[chunk.slots]
        width = chunk.tokens.shape[1]
        block = block_after(chunk.starts, chunk.counts, table, width, state.page_size)
        hidden, features, pool = models.target.apply(
            {"params": params["target"]}, chunk.tokens, block, state.target_pool
        )
        ends = chunk.starts + chunk.counts
        last_rows = jnp.maximum(chunk.counts - 1, 0)[:, None, None]
        last = jnp.take_along_axis(hidden, last_rows, axis=1)
        tokens, logprobs = _read_tokens(
            models, params, state, chunk.slots, last, ends[:, None], draws
        )
        state = dataclasses.replace(
            state,
            target_pool=pool,
            draft_pool=_absorb(models, params, state, features, block),
            lengths=state.lengths.at[chunk.slots].set(ends),
            last_tokens=state.last_tokens.at[chunk.slots].set(tokens[:, 0]),
            tokens=_noted(
                _noted(state.tokens, chunk.slots, chunk.starts, chunk.tokens),
                chunk.slots,
                ends,
                tokens,
            ),
        )
        emitted = jnp.ones_like(ends)
        return state, StepResult(tokens, emitted, jnp.zeros_like(ends), logprobs)


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


def verify_step(
    models: Models,
    params: Params,
    state: EngineState,
    slots: Int[Array, " rows"],
    drafts: Int[Array, "rows drafts"],
    num_drafts: Int[Array, " rows"],
    draft_logits: Float[Array, "rows drafts vocab"] | None = None,
    *,
    draws: bool,
) -> tuple[EngineState, Verified]:
    """One target forward over [current, drafts...]; writes their rows, counts none of them."""
    with jax.named_scope("verify"):
        active = _active(state, slots)
        block = _block_of(state, slots, active * (num_drafts + 1), drafts.shape[1] + 1)
        tokens = jnp.concatenate([state.last_tokens[slots][:, None], drafts], axis=1)
        hidden, features, pool = models.target.apply(
            {"params": params["target"]}, tokens, block, state.target_pool
        )
        beside = None
        if draft_logits is not None:
            beside = Drafts(drafts, num_drafts, draft_logits)
        said, logprobs = _read_tokens(
            models, params, state, slots, hidden, block.positions + 1, draws, beside
        )
        verified = Verified(said, active * num_drafts, active, features, logprobs)
        return dataclasses.replace(state, target_pool=pool), verified


def commit_step(
    models: Models,
    params: Params,
    state: EngineState,
    slots: Int[Array, " rows"],
    verified: Verified,
    accepted: Int[Array, " rows"],
) -> tuple[EngineState, StepResult]:
    """Keeps the current token and the accepted drafts; what follows is stale from now on."""
    with jax.named_scope("commit"):
        emitted = verified.active * (accepted + 1)
        block = _block_of(state, slots, emitted, verified.tokens.shape[1])
        newest = jnp.take_along_axis(verified.tokens, accepted[:, None], axis=1)[:, 0]
        newest = jnp.where(verified.active > 0, newest, state.last_tokens[slots])
        committed = dataclasses.replace(
            state,
            draft_pool=_absorb(models, params, state, verified.features, block),
            lengths=state.lengths.at[slots].add(emitted),
            last_tokens=state.last_tokens.at[slots].set(newest),
            tokens=_noted(state.tokens, slots, state.lengths[slots] + 1, verified.tokens),
        )
        return committed, StepResult(
            verified.tokens, emitted, verified.num_drafts, verified.logprobs
        )


def accept_step(
    models: Models,
    params: Params,
    state: EngineState,
    slots: Int[Array, " rows"],
    drafts: Int[Array, "rows drafts"],
    verified: Verified,
) -> tuple[EngineState, StepResult]:
    """Acceptance and commit on the device."""
    with jax.named_scope("accept"):
        accepted = _accepted(models, params, state, slots, drafts, verified)
    return commit_step(models, params, state, slots, verified, accepted)


def _accepted(
    models: Models,
    params: Params,
    state: EngineState,
    slots: Int[Array, " rows"],
    drafts: Int[Array, "rows drafts"],
    verified: Verified,
) -> Int[Array, " rows"]:
    if not models.synthetic or drafts.shape[1] == 0:
        return accept(drafts, verified.tokens, verified.num_drafts)
    seeds, lengths = state.sampling.seed[slots], state.lengths[slots]
    return draw_accepted(
        params["synthetic"][: drafts.shape[1]], seeds, lengths, verified.num_drafts
    )


def plain_step(
    models: Models, params: Params, state: EngineState, slots: Int[Array, " rows"], *, draws: bool
) -> tuple[EngineState, StepResult]:
    """One token for every row: a verify without drafts, committed."""
    none = jnp.zeros((slots.shape[0], 0), jnp.int32)
    state, verified = verify_step(
        models, params, state, slots, none, jnp.zeros_like(slots), draws=draws
    )
    return accept_step(models, params, state, slots, none, verified)


def spec_step(
    models: Models,
    params: Params,
    state: EngineState,
    slots: Int[Array, " rows"],
    num_drafts: Int[Array, " rows"],
    *,
    draws: bool,
    width: int | None = None,
) -> tuple[EngineState, StepResult]:
    """Draft, verify, accept and commit; nothing goes through the host."""
    state, drafts = draft_step(models, params, state, slots, width=width)
    state, verified = verify_step(models, params, state, slots, drafts, num_drafts, draws=draws)
    return accept_step(models, params, state, slots, drafts, verified)


def lookup_spec_step(
    models: Models,
    params: Params,
    state: EngineState,
    slots: Int[Array, " rows"],
    num_drafts: Int[Array, " rows"],
    *,
    lookup: Lookup,
    draws: bool,
) -> tuple[EngineState, StepResult]:
    """`spec_step` with drafts that are looked up."""
    state, drafts = lookup_step(models, params, state, slots, num_drafts, lookup=lookup)
    block = drafts.tokens, drafts.num_drafts
    state, verified = verify_step(models, params, state, slots, *block, draws=draws)
    return accept_step(models, params, state, slots, drafts.tokens, verified)


def drawn_spec_step(
    models: Models,
    params: Params,
    state: EngineState,
    slots: Int[Array, " rows"],
    num_drafts: Int[Array, " rows"],
    *,
    width: int | None = None,
) -> tuple[EngineState, StepResult]:
    """`spec_step` with drafts that are drawn."""
    state, (drafts, logits) = drawn_draft_step(models, params, state, slots, width=width)
    state, verified = verify_step(
        models, params, state, slots, drafts, num_drafts, logits, draws=True
    )
    return accept_step(models, params, state, slots, drafts, verified)


def _places(models: Models, width: int | None) -> int:
    return (models.drafter.config.block_size if width is None else width) - 1


def _active(state: EngineState, slots: Int[Array, " rows"]) -> Int[Array, " rows"]:
    return (state.lengths[slots] < state.limits[slots]).astype(jnp.int32)


def _noted(
    kept: Int[Array, "slots positions"] | None,
    slots: Int[Array, " rows"],
    starts: Int[Array, " rows"],
    tokens: Int[Array, "rows width"],
) -> Int[Array, "slots positions"] | None:
    """Tokens that follow each other from `starts`. Those that are not kept lie beyond the length,
    and are overwritten before they are read, as in the pools."""
    if kept is None:
        return None
    places = starts[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    return kept.at[slots[:, None], places].set(tokens, mode="drop")


def _block_to_draft(models: Models, state: EngineState, slots: Int[Array, " rows"]) -> Block:
    block_size = models.drafter.config.block_size
    return _block_of(state, slots, _active(state, slots) * block_size, block_size)


def _block_of(
    state: EngineState, slots: Int[Array, " rows"], spans: Int[Array, " rows"], width: int
) -> Block:
    return block_after(state.lengths[slots], spans, state.page_table[slots], width, state.page_size)


def _read_tokens(
    models: Models,
    params: Params,
    state: EngineState,
    slots: Int[Array, " rows"],
    hidden: Float[Array, "rows width hidden"],
    positions: Int[Array, "rows width"],
    draws: bool,
    drawn: Drafts | None = None,
) -> tuple[Int[Array, "rows width"], TopLogprobs | None]:
    """The target's tokens at `positions`, from the hidden states one place before them."""
    logits = models.target.apply({"params": params["target"]}, hidden, method="logits")
    if not draws:
        return greedy(logits), None
    rows = state.sampling.of(slots)
    if drawn is None:
        tokens = sample(logits, rows, positions)
    else:
        beside = drawn.tokens, drawn.num_drafts, drawn.logits
        tokens = sample_beside_drafts(logits, *beside, rows, positions)
    return tokens, top_logprobs(logits, tokens)


def _absorb(
    models: Models,
    params: Params,
    state: EngineState,
    features: Float[Array, "rows width features"],
    block: Block,
) -> Any:
    if models.drafter is None:
        return state.draft_pool
    with jax.named_scope("context"):
        return dflash.absorb(models.drafter, params, features, block, state.draft_pool)


def seat_step(models: Models, params: Params, state: EngineState, seat: Seat) -> EngineState:
    """Gives a slot to a request; its prompt is still to be read."""
    put = lambda entries, entry: entries.at[seat.slot].set(entry)
    return dataclasses.replace(
        state,
        page_table=put(state.page_table, seat.pages),
        lengths=put(state.lengths, 0),
        limits=put(state.limits, seat.limit),
        sampling=jax.tree.map(put, state.sampling, seat.sampling),
    )
