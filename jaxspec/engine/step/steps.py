"""The steps: pure functions of models, parameters, state and inputs.

    admit_step      gives slots to requests
    copy_step       saves the recurrent state of a slot, or gives a saved one to a slot
    prefill_step    reads a chunk of some prompts
    decode_step     drafts, verifies, accepts and commits, in one program
      draft_step      a device proposer proposes drafts
      replace_step    drafts of the host replace the device's
      verify_step     the target reads the newest token and the drafts in one forward
      accept_step     accepts the longest prefix of right drafts, and commits it
      commit_step     makes the accepted tokens part of the context; the rest is rolled back

Plain decoding is a decode step without drafts. True lengths are data and never shapes: a step is
compiled once for each batch size and width, and once more with `draws`, for batches in which some
request samples or returns log probabilities. Reading a chunk is compiled once more for batches in
which some request returns log probabilities of its prompt.
"""

import dataclasses
import functools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.acceptance import accept, draw_accepted
from jaxspec.acceptance.outcomes import Outcomes, after_step, chances
from jaxspec.acceptance.scores import (
    after_verified,
    with_drafts,
    with_scores,
    without_drafts,
)
from jaxspec.acceptance.shares import shared_out
from jaxspec.cache.packing import packing_of, unpacked
from jaxspec.engine.requests.sampling_params import MAX_LOGPROBS
from jaxspec.engine.step.choose import as_input, head, target_tokens
from jaxspec.engine.step.forward import (
    ChunkRead,
    absorbed,
    chunk_block,
    drafted_block,
    keep_chunk,
    last_of_chunk,
    read_block,
    verified_drafts,
)
from jaxspec.engine.step.io import (
    Admission,
    Drafting,
    Models,
    PromptChunk,
    StepResult,
    Verified,
)
from jaxspec.engine.step.packed import PackedAdmission, PackedChunk
from jaxspec.engine.step.state import EngineState
from jaxspec.proposers.device import (
    DraftInputs,
    Drafts,
    Params,
    Recalls,
    no_drafts,
)
from jaxspec.sampling import TopLogprobs, top_logprobs_in_pieces

Slots = Int[Array, " batch"]


def admit_step(
    models: Models, params: Params, state: EngineState, packed: PackedAdmission
) -> tuple[EngineState, None]:
    """Gives slots to requests. At least the last token of each prompt is still to be read."""
    admission = packed.admission
    put = lambda entries, new: entries.at[admission.slots].set(new)
    admitted = dataclasses.replace(
        state,
        page_table=put(state.page_table, admission.pages),
        proposers=_recall(models, state, admission),
        lengths=put(state.lengths, admission.lengths),
        limits=put(state.limits, admission.limits),
        sampling=jax.tree.map(put, state.sampling, admission.sampling),
        outcomes=jax.tree.map(lambda entries: put(entries, 0), state.outcomes),
    )
    return admitted, None


def copy_step(
    models: Models,
    params: Params,
    state: EngineState,
    source: Int[Array, ""],
    target: Int[Array, ""],
) -> tuple[EngineState, None]:
    """Copies the state that layers keep per request from one row of the cache to another. A row
    belongs to a slot or, after those of the slots, to a saved state."""
    return dataclasses.replace(state, cache=state.cache.with_row_copied(source, target)), None


def prefill_step(
    models: Models, params: Params, state: EngineState, packed: PackedChunk, *, draws: bool
) -> tuple[EngineState, StepResult]:
    """Reads a chunk of every prompt. If a prompt ends with its chunk, the target's token after it
    is the first output token."""
    chunk = packed.chunk
    with jax.named_scope("prefill"):
        block = chunk_block(models, state, chunk)
        hidden, features, cache = read_block(models, params, state, chunk.tokens, block)
        last, ends = last_of_chunk(chunk, hidden), chunk.starts + chunk.counts
        chosen = target_tokens(models, params, state, chunk.slots, last, ends[:, None], draws)
        hidden = models.shards.after(hidden, *jax.tree.leaves(chosen))
        of_prompt = _prompt_logprobs(models, params, chunk, hidden)
        read = models.shards.after(chunk.tokens, *jax.tree.leaves((chosen, of_prompt)))
        chunk = dataclasses.replace(chunk, tokens=read)
        state = dataclasses.replace(state, cache=cache.commit(block))
        state, result = keep_chunk(models, params, state, chunk, ChunkRead(features, *chosen))
        return state, dataclasses.replace(result, prompt=of_prompt)


def decode_step(
    models: Models,
    params: Params,
    state: EngineState,
    slots: Slots,
    num_drafts: Int[Array, " batch"],
    *,
    drafting: Drafting | None,
    draws: bool,
) -> tuple[EngineState, StepResult]:
    """One speculative step of every request; without `drafting`, one token each."""
    drafts = no_drafts(slots.size)
    if drafting is not None:
        state, drafts = draft_step(models, params, state, slots, num_drafts, drafting=drafting)
    num_tokens = None if drafting is None else drafting.num_tokens
    state, verified = verify_step(
        models, params, state, slots, drafts, draws=draws, num_tokens=num_tokens
    )
    return accept_step(models, params, state, slots, drafts, verified)


def draft_step(
    models: Models,
    params: Params,
    state: EngineState,
    slots: Slots,
    num_drafts: Int[Array, " batch"],
    *,
    drafting: Drafting,
) -> tuple[EngineState, Drafts]:
    """At most `num_drafts` drafts for every request, from one of the proposers."""
    with jax.named_scope("draft"):
        inputs = _draft_inputs(models, state, slots, num_drafts)
        of_proposers, which = list(state.proposers), drafting.proposer
        of_proposers[which], drafts = models.proposers[which].propose(
            models.target,
            params,
            of_proposers[which],
            inputs,
            width=drafting.width,
            drawn=drafting.drawn,
        )
        state = dataclasses.replace(state, proposers=tuple(of_proposers))
        if drafts.scores is not None:
            tokens = models.shards.after(drafts.tokens, drafts.scores)
            drafts = dataclasses.replace(drafts, tokens=tokens)
        if state.scores is not None:
            state = dataclasses.replace(
                state, scores=with_drafts(state.scores, slots, drafts.scores)
            )
        if drafting.num_tokens is not None:
            drafts = _shared_out(state, inputs, drafts, drafting.num_tokens)
        return state, dataclasses.replace(drafts, scores=None)


def replace_step(
    models: Models, params: Params, state: EngineState, drafts: Drafts, of_host: Drafts
) -> tuple[EngineState, Drafts]:
    """Replaces drafts by the host's, for requests that have some. The host's drafts were not drawn,
    so the distribution of each has all its probability on that draft."""
    replaced = of_host.num_drafts > 0
    tokens = jnp.where(replaced[:, None], of_host.tokens, drafts.tokens)
    logits = drafts.logits
    if logits is not None:
        own = models.shards.places(of_host.tokens, logits.shape[-1])
        chosen = jnp.arange(logits.shape[-1]) == own[..., None]
        certain = jnp.where(chosen, 0.0, -jnp.inf).astype(logits.dtype)
        logits = jnp.where(replaced[:, None, None], certain, logits)
    num_drafts = jnp.where(replaced, of_host.num_drafts, drafts.num_drafts)
    if state.scores is not None:  # they belong to the drafts that were replaced
        state = dataclasses.replace(state, scores=without_drafts(state.scores, replaced.any()))
    return state, Drafts(tokens, num_drafts, logits)


def verify_step(
    models: Models,
    params: Params,
    state: EngineState,
    slots: Slots,
    drafts: Drafts,
    *,
    draws: bool,
    num_tokens: int | None = None,
) -> tuple[EngineState, Verified]:
    """One target forward over [newest, drafts...]: writes the block and commits none of it. With
    `num_tokens`, the target reads only so many tokens in all, without padding between requests."""
    with jax.named_scope("verify"):
        block, tokens = drafted_block(models, state, slots, drafts)
        width = tokens.shape[1]
        packing = None if num_tokens is None else packing_of(block.counts, width, num_tokens)
        hidden, features, cache = read_block(models, params, state, tokens, block, packing)
        chosen = target_tokens(
            models, params, state, slots, hidden, block.positions + 1, draws, drafts, packing
        )
        features = unpacked(features, packing)
        return verified_drafts(state, cache, slots, drafts, features, *chosen)


def accept_step(
    models: Models,
    params: Params,
    state: EngineState,
    slots: Slots,
    drafts: Drafts,
    verified: Verified,
) -> tuple[EngineState, StepResult]:
    """Accepts on the device, and commits."""
    with jax.named_scope("accept"):
        places = drafts.tokens.shape[1]
        if models.synthetic and places:
            seeds, lengths = state.sampling.seed[slots], state.lengths[slots]
            rates = params["synthetic"][..., :places]
            accepted = draw_accepted(rates, seeds, lengths, verified.num_drafts)
        else:
            accepted = jnp.asarray(accept(drafts.tokens, verified.tokens, verified.num_drafts))
    return commit_step(models, params, state, slots, verified, accepted)


def commit_step(
    models: Models,
    params: Params,
    state: EngineState,
    slots: Slots,
    verified: Verified,
    accepted: Int[Array, " batch"],
) -> tuple[EngineState, StepResult]:
    """Commits the newest token and the accepted drafts. The target's token after them becomes the
    newest token."""
    with jax.named_scope("commit"):
        emitted = verified.active * (accepted + 1)
        block = state.block(slots, emitted, verified.tokens.shape[1], models.page_size)
        last = state.last_tokens[slots]
        # An accepted draft is the target's own token, so the block's tokens need no other source.
        tokens = jnp.concatenate([last[:, None], verified.tokens[:, :-1]], axis=1)
        newest = jnp.take_along_axis(verified.tokens, accepted[:, None], axis=1)[:, 0]
        newest = jnp.where(verified.active > 0, newest, last)
        committed = dataclasses.replace(
            state,
            cache=state.cache.with_written(verified.written).commit(block),
            proposers=absorbed(models, params, state, block, tokens, verified.features),
            lengths=state.lengths.at[slots].add(emitted),
            last_tokens=state.last_tokens.at[slots].set(as_input(newest)),
            **_with_outcomes(state, slots, verified, accepted),
        )
        return committed, StepResult(
            verified.tokens, emitted, verified.num_drafts, verified.logprobs
        )


def _draft_inputs(
    models: Models, state: EngineState, slots: Slots, num_drafts: Int[Array, " batch"]
) -> DraftInputs:
    lengths = state.lengths[slots]
    return DraftInputs(
        slots=slots,
        tokens=state.last_tokens[slots],
        lengths=lengths,
        active=state.active(slots),
        num_drafts=num_drafts,
        room=state.limits[slots] - lengths - 1,
        page_table=state.page_table[slots],
        sampling=state.sampling.of(slots),
        page_size=models.page_size,
        scored=state.scores is not None,
    )


def _shared_out(state: EngineState, inputs: DraftInputs, drafts: Drafts, num_tokens: int) -> Drafts:
    """The drafts, cut to so many per request that the step verifies `num_tokens` tokens."""
    assert state.scores is not None, "steps share out by the outcomes of earlier ones"
    at = inputs.slots, slice(drafts.tokens.shape[1])
    likely = with_scores(state.scores, state.scores.of_slots[at], _chances(state, at))
    most = jnp.minimum(drafts.num_drafts, inputs.room)
    budget = num_tokens - inputs.active.sum()
    shares = shared_out(jnp.cumprod(likely, axis=1), most, budget)
    return dataclasses.replace(drafts, num_drafts=shares)


def _chances(state: EngineState, at: tuple[Slots, slice]) -> Float[Array, "batch drafts"]:
    """The chance of each draft to be accepted, from the outcomes of its request."""
    assert state.outcomes is not None, "outcomes are kept if steps share out"
    return jnp.asarray(chances(state.outcomes.tried[at], state.outcomes.kept[at]))


def _with_outcomes(
    state: EngineState, slots: Slots, verified: Verified, accepted: Int[Array, " batch"]
) -> dict[str, Any]:
    """The state's outcomes and scores after a step, as its fields; empty if it keeps none."""
    places = verified.tokens.shape[1] - 1
    if state.outcomes is None or state.scores is None or places == 0:
        return {}
    at, became = (slots, slice(places)), (verified.num_drafts, accepted)
    own, expected = state.scores.of_slots[at], _chances(state, at)
    tried, kept = state.outcomes.tried, state.outcomes.kept
    new_tried, new_kept = after_step(tried[at], kept[at], *became)
    put = lambda entries, new: entries.at[at].set(new)
    return {
        "outcomes": Outcomes(put(tried, new_tried), put(kept, new_kept)),
        "scores": after_verified(state.scores, own, expected, *became),
    }


def _recall(models: Models, state: EngineState, admission: Admission) -> tuple[Any, ...]:
    """The states of all proposers after requests, whose first tokens are cached, got slots."""
    if admission.tokens is None:
        return state.proposers
    known = list(zip(admission.slots, admission.tokens, admission.lengths, strict=True))
    return tuple(
        functools.reduce(lambda one, request: proposer.recall(one, *request), known, of_proposer)
        if isinstance(proposer, Recalls)
        else of_proposer
        for proposer, of_proposer in zip(models.proposers, state.proposers, strict=True)
    )


def _prompt_logprobs(
    models: Models, params: Params, chunk: PromptChunk, hidden: Float[Array, "batch width hidden"]
) -> TopLogprobs | None:
    """Log probabilities of the prompt's tokens in `chunk.following`; None if it has none."""
    if chunk.following is None:
        return None
    with jax.named_scope("prompt_logprobs"):
        whole, shards = partial(head, models, params), models.shards
        return top_logprobs_in_pieces(whole, hidden, chunk.following, MAX_LOGPROBS, shards)
