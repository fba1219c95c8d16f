"""The parts that all steps have in which the target reads tokens: the block of tokens, the forward
pass, and what is kept of a chunk of a prompt."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.cache.block import Block, block_after
from jaxspec.cache.cache import Cache
from jaxspec.cache.packing import Packing
from jaxspec.engine.step.choose import as_input
from jaxspec.engine.step.io import Models, PromptChunk, StepResult, Verified
from jaxspec.engine.step.state import EngineState
from jaxspec.proposers.device import Committed, Drafts, Params
from jaxspec.sampling import TopLogprobs

Slots = Int[Array, " batch"]


@dataclasses.dataclass(frozen=True)
class ChunkRead:
    """The target's results for a chunk of some prompts."""

    features: Float[Array, "batch width features"]
    """The target's hidden states of the chunk, for the proposers."""
    tokens: Int[Array, "batch tokens"]
    """The target's token after each chunk."""
    logprobs: TopLogprobs | None
    """Log probabilities of `tokens`; None in a program that draws nothing."""


def read_block(
    models: Models,
    params: Params,
    state: EngineState,
    tokens: Int[Array, "batch width"],
    block: Block,
    packing: Packing | None = None,
) -> tuple[Float[Array, "filled tokens hidden"], Float[Array, "filled tokens features"], Any]:
    """Runs the target over a block of tokens."""
    packed = () if packing is None else (packing,)
    return models.target.apply({"params": params["target"]}, tokens, block, state.cache, *packed)


def absorbed(
    models: Models,
    params: Params,
    state: EngineState,
    block: Block,
    tokens: Int[Array, "batch width"],
    features: Float[Array, "batch width features"],
) -> tuple[Any, ...]:
    """The states of all proposers after these tokens."""
    committed = Committed(block, tokens, features, models.target)
    with jax.named_scope("context"):
        return tuple(
            proposer.absorb(params, of_proposer, committed)
            for proposer, of_proposer in zip(models.proposers, state.proposers, strict=True)
        )


# A block of drafts


def drafted_block(
    models: Models, state: EngineState, slots: Slots, drafts: Drafts
) -> tuple[Block, Int[Array, "batch width"]]:
    """The block that verifies drafts: [newest, drafts...] of every request."""
    counts, width = state.active(slots) * (drafts.num_drafts + 1), drafts.tokens.shape[1] + 1
    block = state.block(slots, counts, width, models.page_size)
    return block, jnp.concatenate([state.last_tokens[slots][:, None], drafts.tokens], axis=1)


def verified_drafts(
    state: EngineState,
    cache: Cache,
    slots: Slots,
    drafts: Drafts,
    features: Float[Array, "batch width features"],
    tokens: Int[Array, "batch width"],
    logprobs: TopLogprobs | None,
) -> tuple[EngineState, Verified]:
    """The state with the cache in which the block was written, and what a commit needs."""
    active, (cache, written) = state.active(slots), cache.without_written()
    num_drafts = active * drafts.num_drafts
    verified = Verified(tokens, num_drafts, active, features, written, logprobs)
    return dataclasses.replace(state, cache=cache), verified


# A chunk of a prompt


def chunk_block(models: Models, state: EngineState, chunk: PromptChunk) -> Block:
    """The block of a chunk of every prompt."""
    table, width = state.page_table[chunk.slots], chunk.tokens.shape[1]
    rows = chunk.starts, chunk.counts, table, width, models.page_size
    return block_after(chunk.slots, *rows, final=True)


def last_of_chunk(
    chunk: PromptChunk, hidden: Float[Array, "batch width hidden"]
) -> Float[Array, "batch tokens hidden"]:
    """The hidden states of each chunk's last token."""
    last = jnp.maximum(chunk.counts - 1, 0)[:, None, None]
    return jnp.take_along_axis(hidden, last, axis=1)


def keep_chunk(
    models: Models, params: Params, state: EngineState, chunk: PromptChunk, read: ChunkRead
) -> tuple[EngineState, StepResult]:
    """Adds a chunk, which the target's cache holds already, to the committed lengths, and passes it
    to the proposers. The token after the chunk becomes the newest token."""
    block, ends = chunk_block(models, state, chunk), chunk.starts + chunk.counts
    newest = read.tokens[:, 0]
    if chunk.known is not None:
        newest = jnp.where(chunk.known < 0, newest, chunk.known)
    kept = dataclasses.replace(
        state,
        proposers=absorbed(models, params, state, block, chunk.tokens, read.features),
        lengths=state.lengths.at[chunk.slots].set(ends),
        last_tokens=state.last_tokens.at[chunk.slots].set(as_input(newest)),
    )
    ones, none = jnp.ones_like(ends), jnp.zeros_like(ends)
    return kept, StepResult(read.tokens, ones, none, read.logprobs)
