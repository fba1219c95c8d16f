"""The steps: pure functions of models, parameters, state and inputs. A whole one and its parts:

    prefill_step              a chunk of prompts in, keys, values and context written
    draft_step                the drafter proposes a block; drawn_draft_step draws it
    replace_step              what the host proposes, in place of the drafter's drafts
    lookup_step               prompt lookup, in the drafter's place
    verify_step               the target reads current token and drafts in one forward
    accept_step               acceptance on the device, and commit_step: accepted rows become
                              context, lengths advance; the rest is rolled back by not being counted
    spec_step                 draft, verify, accept and commit in one program

The parts are in `propose_steps` and `target_steps`; here they are put together. Plain decoding is a
verify without drafts. True lengths are data, never shapes: a step is compiled once for a number of
rows and a width, and once more with `draws`, for batches in which somebody samples or wants log
probabilities.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.engine.step.io import Models, Params, Seat, StepResult
from jaxspec.engine.step.propose import draft_step, drawn_draft_step, lookup_step
from jaxspec.engine.step.state import EngineState
from jaxspec.engine.step.target import accept_step, verify_step
from jaxspec.proposers.lookup import Lookup


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
