"""Steps of the target: it reads prompts, verifies blocks, and commits what it accepts of them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.acceptance import accept, draw_accepted
from jaxspec.cache.block import Block, block_after
from jaxspec.engine.step.io import Drafts, Models, Params, PromptChunk, StepResult, Verified
from jaxspec.engine.step.rows import active, block_of, noted
from jaxspec.engine.step.state import EngineState
from jaxspec.proposers import dflash
from jaxspec.sampling import (
    TopLogprobs,
    greedy,
    rejection_sample,
    sample,
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
            tokens=noted(
                noted(state.tokens, chunk.slots, chunk.starts, chunk.tokens),
                chunk.slots,
                ends,
                tokens,
            ),
        )
        emitted = jnp.ones_like(ends)
        return state, StepResult(tokens, emitted, jnp.zeros_like(ends), logprobs)


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
        living = active(state, slots)
        block = block_of(state, slots, living * (num_drafts + 1), drafts.shape[1] + 1)
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
        verified = Verified(said, living * num_drafts, living, features, logprobs)
        return dataclasses.replace(state, target_pool=pool), verified


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
        if models.synthetic and drafts.shape[1]:
            rates = params["synthetic"][: drafts.shape[1]]
            seeds, lengths = state.sampling.seed[slots], state.lengths[slots]
            accepted = draw_accepted(rates, seeds, lengths, verified.num_drafts)
        else:
            accepted = accept(drafts, verified.tokens, verified.num_drafts)
    return commit_step(models, params, state, slots, verified, accepted)


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
        block = block_of(state, slots, emitted, verified.tokens.shape[1])
        newest = jnp.take_along_axis(verified.tokens, accepted[:, None], axis=1)[:, 0]
        newest = jnp.where(verified.active > 0, newest, state.last_tokens[slots])
        committed = dataclasses.replace(
            state,
            draft_pool=_absorb(models, params, state, verified.features, block),
            lengths=state.lengths.at[slots].add(emitted),
            last_tokens=state.last_tokens.at[slots].set(newest),
            tokens=noted(state.tokens, slots, state.lengths[slots] + 1, verified.tokens),
        )
        return committed, StepResult(
            verified.tokens, emitted, verified.num_drafts, verified.logprobs
        )


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
        tokens = rejection_sample(logits, *beside, rows, positions)
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
