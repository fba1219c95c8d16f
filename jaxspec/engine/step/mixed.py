"""A decode step that also reads a chunk of a prompt, so that weights are read once for both.

    tokens      width
    request 0   newest d1 d2 d3
    request 1   newest d1 d2 d3
    chunk       t8  t9  t10 t11      the chunk's rows continue each other: tokens 8 to 15 of one
                t12 t13 t14 t15      prompt are two rows of its slot, behind 8 and 12 tokens

A layer writes the keys and values of all rows before any of them attends, so a row of the chunk
finds the rows before it in the pages, like the rest of its context.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.cache.block import Block, block_after, joined
from jaxspec.cache.packing import packing_of, unpacked
from jaxspec.engine.step.choose import head, tokens_from
from jaxspec.engine.step.forward import (
    ChunkRead,
    drafted_block,
    keep_chunk,
    last_of_chunk,
    read_block,
    verified_drafts,
)
from jaxspec.engine.step.io import Drafting, Models, PromptChunk, StepResult, Verified
from jaxspec.engine.step.packed import PackedChunk
from jaxspec.engine.step.state import EngineState
from jaxspec.engine.step.steps import accept_step, draft_step
from jaxspec.proposers.device import Drafts, Params, no_drafts

Slots = Int[Array, " batch"]


def mixed_step(
    models: Models,
    params: Params,
    state: EngineState,
    slots: Slots,
    num_drafts: Int[Array, " batch"],
    packed: PackedChunk,
    *,
    drafting: Drafting | None,
    draws: bool,
) -> tuple[EngineState, tuple[StepResult, StepResult]]:
    """A decode step of every request, in which the target also reads a chunk of one prompt, a whole
    number of rows. Returns the result of a decode step and that of a prefill step."""
    chunk, drafts = packed.chunk, no_drafts(slots.size)
    if drafting is not None:
        state, drafts = draft_step(models, params, state, slots, num_drafts, drafting=drafting)
        drafts = _filled(drafts, row_width(drafting.width, chunk.tokens.size) - 1)
    with jax.named_scope("verify"):
        num_tokens = None if drafting is None else drafting.num_tokens
        given = slots, drafts, chunk, draws, num_tokens
        state, verified, read = _verify_beside(models, params, state, *given)
    state, decoded = accept_step(models, params, state, slots, drafts, verified)
    with jax.named_scope("prefill"):
        tokens = models.shards.after(chunk.tokens, read.tokens, decoded.tokens)
        chunk = dataclasses.replace(chunk, tokens=tokens)
        state, first = keep_chunk(models, params, state, chunk, read)
    return state, (decoded, first)


def row_width(drafted: int, chunk: int) -> int:
    """Places of a row: as many as a request drafts, or some more, so that a chunk of so many tokens
    fills whole rows."""
    return next(width for width in range(drafted, chunk + 1) if chunk % width == 0)


def _filled(drafts: Drafts, places: int) -> Drafts:
    """The drafts, followed by places without any."""
    more = (0, 0), (0, places - drafts.tokens.shape[1])
    logits = drafts.logits
    if logits is not None:
        logits = jnp.pad(logits, (*more, (0, 0)))
    return dataclasses.replace(drafts, tokens=jnp.pad(drafts.tokens, more), logits=logits)


def _verify_beside(
    models: Models,
    params: Params,
    state: EngineState,
    slots: Slots,
    drafts: Drafts,
    chunk: PromptChunk,
    draws: bool,
    num_tokens: int | None,
) -> tuple[EngineState, Verified, ChunkRead]:
    """One target forward over [newest, drafts...] and the chunk. The head then runs once, over all
    tokens that need logits: those of all rows of drafts, and the chunk's last. With `num_tokens`,
    the target reads only so many tokens besides the chunk, without padding between requests."""
    block, tokens = drafted_block(models, state, slots, drafts)
    batch, width = tokens.shape
    both = joined(block, _rows_of_chunk(models, state, chunk, width))
    tokens = jnp.concatenate([tokens, chunk.tokens.reshape(-1, width)])
    packing = None
    if num_tokens is not None:
        packing = packing_of(both.counts, width, num_tokens + chunk.tokens.size)
    hidden, features, cache = read_block(models, params, state, tokens, both, packing)
    of_drafts, of_chunk = _apart(unpacked(hidden, packing), batch)
    packed = None
    if num_tokens is not None and not draws:  # the requests' tokens come first
        of_drafts, packed = hidden[:num_tokens], packing_of(block.counts, width, num_tokens)
    logits = head(models, params, _one_below_the_other(of_drafts, last_of_chunk(chunk, of_chunk)))
    positions, ends = block.positions + 1, (chunk.starts + chunk.counts)[:, None]
    own = logits[:-1].reshape(*of_drafts.shape[:2], -1)
    answers, logprobs = tokens_from(models, state, slots, own, positions, draws, drafts)
    last = models.shards.after(logits[-1:], answers, *jax.tree.leaves(logprobs))
    chosen = tokens_from(models, state, chunk.slots, last, ends, draws)
    answers = models.shards.after(answers, *jax.tree.leaves(chosen))
    of_drafts, of_chunk = _apart(unpacked(features, packing), batch)
    of_target = of_drafts, unpacked(answers, packed), logprobs
    state, verified = verified_drafts(state, cache, slots, drafts, *of_target)
    return state, verified, ChunkRead(of_chunk, *chosen)


def _rows_of_chunk(models: Models, state: EngineState, chunk: PromptChunk, width: int) -> Block:
    """The chunk as rows of a block, each right after the one before it. Rows without tokens of the
    chunk are placed right after its last token, because later positions were not written."""
    rows = chunk.tokens.shape[1] // width
    before = jnp.arange(rows, dtype=jnp.int32) * width
    lengths = chunk.starts + jnp.minimum(before, chunk.counts)
    counts = jnp.clip(chunk.counts - before, 0, width)
    slots = jnp.repeat(chunk.slots, rows)
    return block_after(slots, lengths, counts, state.page_table[slots], width, models.page_size)


def _apart(
    both: Float[Array, "filled width size"], batch: int
) -> tuple[Float[Array, "batch width size"], Float[Array, "{1} tokens size"]]:
    """The rows of drafts, and those of the chunk as the tokens of one request."""
    rows, width, size = both[batch:].shape
    return both[:batch], both[batch:].reshape(1, rows * width, size)  # also of no features


def _one_below_the_other(
    of_drafts: Float[Array, "batch width hidden"], last: Float[Array, "{1} {1} hidden"]
) -> Float[Array, "packed {1} hidden"]:
    return jnp.concatenate([of_drafts.reshape(-1, 1, of_drafts.shape[-1]), last])
