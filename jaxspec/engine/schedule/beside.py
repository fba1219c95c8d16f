"""Chooses whether a decode step also reads a chunk of a prompt, and runs such a step.

A chunk that is read in a decode step makes that step a little longer. A separate program would stop
the requests that decode for as long as it takes to read all weights, but it reads more tokens at
once, so that the prompt's own request decodes sooner. So decode steps read prompts only while few
prompt tokens are to be read and a slot is free: with all slots taken, throughput matters most.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxspec.engine.plan.plan import DecodePrograms, Plan, Shapes
from jaxspec.engine.requests.request import Request
from jaxspec.engine.schedule.decode import DecodeChoice, DecodeInputs, device_width
from jaxspec.engine.schedule.drafters import Drafters
from jaxspec.engine.schedule.prefill import Allowance, choose_prefill
from jaxspec.engine.schedule.record import Ledger
from jaxspec.engine.step.device import Device, Runs
from jaxspec.engine.step.io import StepResult
from jaxspec.engine.step.mixed import mixed_step
from jaxspec.engine.step.packed import PackedChunk
from jaxspec.engine.step.upload import prompt_chunk

MOST_STEPS = 8
"""If the prompts need more decode steps than this, each reading a chunk, separate programs read
them."""


def choose_beside(
    plan: Plan, ledger: Ledger, running: Sequence[Request], ready: Sequence[Request]
) -> Request | None:
    """The request from whose prompt the decode step of the `ready` requests also reads a chunk.
    None if separate programs read prompts: while no request has more than its first token, no slot
    is free, log probabilities of a prompt are wanted, or much is to be read.

    The whole of each prompt counts, including what was read of it. So a long prompt is read by
    separate programs to its end, and so are those that arrive meanwhile.
    """
    decodes = any(request.num_tokens > 1 for request in ready)
    all_taken = ledger.waiting or len(ledger.running) == plan.num_slots
    if not (plan.beside and decodes) or all_taken:
        return None
    unread = [request for request in running if not request.is_prefilled]
    steps = sum(-(-tokens_to_read(request) // plan.beside) for request in unread)
    if steps > MOST_STEPS or any(request.reads_whole_prompt for request in unread):
        return None
    one_chunk = Allowance(ledger.read_since_decode + plan.beside, once=True)
    choice = choose_prefill(Shapes((), ((1, plan.beside),)), ledger, running, one_chunk)
    return None if choice is None else choice[1][0]


def tokens_to_read(request: Request) -> int:
    """Tokens that have to be read for the request, since they were not found in the cache."""
    return len(request.prompt) + max(request.resumed - 1, 0) - request.begins_at


def choose_mixed(
    plan: Plan, drafters: Drafters, ready: Sequence[Request], chosen: Request
) -> DecodeChoice:
    """The program that decodes these requests and reads a chunk of this one's prompt. In an engine
    that chooses widths, the chunk's tokens replace some of the drafts; in any other, requests
    verify whole blocks."""
    batch, draws = plan.shapes.batch_for(len(ready)), any(r.draws for r in (*ready, chosen))
    width = plan.width
    if drafters.adaptive is not None and plan.widths_of(batch):
        alone = device_width(plan, drafters, ready, batch, wanted=True)
        width = drafters.adaptive.width_beside(batch, alone)
    return DecodeChoice(plan.mixed_programs(batch, width, draws), (), (batch, width))


def launch_mixed(
    device: Runs, programs: DecodePrograms, inputs: DecodeInputs, chunk: PackedChunk
) -> tuple[StepResult, StepResult]:
    """Runs the step or, with a `Tracer`, traces its program. Returns the result of the requests
    that decode and that of the prompt."""
    of_requests = inputs.slots, inputs.num_drafts
    return device.run(mixed_step, *of_requests, chunk, **_static(programs))


def is_ready(device: Device, programs: DecodePrograms) -> bool:
    """Whether the program was made. No step waits for it, as other programs can do its work."""
    inputs, chunk = shapes_of_inputs(programs)
    return device.has(mixed_step, inputs.slots, inputs.num_drafts, chunk, **_static(programs))


@functools.lru_cache
def shapes_of_inputs(programs: DecodePrograms) -> tuple[DecodeInputs, PackedChunk]:
    """The shapes of the step's inputs."""

    def inputs() -> tuple[DecodeInputs, PackedChunk]:
        integers = jnp.zeros(programs.batch, jnp.int32)
        return DecodeInputs(integers, integers, None), prompt_chunk([], 1, programs.beside, 0)

    return jax.eval_shape(inputs)


def _static(programs: DecodePrograms) -> dict:
    return {"drafting": programs.drafting, "draws": programs.draws}
