"""Chooses the programs of one decode step, and runs them."""

import dataclasses
from collections.abc import Sequence

import jax
from jaxtyping import Array, Int

from jaxspec.engine.adapt.even import Width
from jaxspec.engine.adapt.loop_costs import Size
from jaxspec.engine.plan.plan import DecodePrograms, Plan
from jaxspec.engine.requests.request import Request
from jaxspec.engine.schedule.drafters import Drafters
from jaxspec.engine.step.device import Device, Runs
from jaxspec.engine.step.io import StepResult
from jaxspec.engine.step.steps import (
    accept_step,
    commit_step,
    decode_step,
    draft_step,
    replace_step,
    verify_step,
)
from jaxspec.engine.step.upload import token_block
from jaxspec.proposers.device import Drafts
from jaxspec.proposers.methods import HostProposer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeInputs:
    """The inputs of the programs of one decode step."""

    slots: Int[Array, " batch"]
    num_drafts: Int[Array, " batch"]
    """Number of drafts wanted from the device, for every request."""
    of_host: Drafts | None
    """Drafts of the host. None if the programs take none; empty drafts if nothing drafts but the
    target reads a whole block nevertheless."""


@dataclasses.dataclass(frozen=True)
class DecodeChoice:
    """The programs of one decode step, and the drafts of the host."""

    programs: DecodePrograms
    of_host: Sequence[Sequence[int]]
    """The drafts that the host proposes, by request; empty if it proposes none."""
    size: Size
    """The batch size, and the width that was chosen, which the programs may round up."""


def choose_decode(plan: Plan, drafters: Drafters, requests: Sequence[Request]) -> DecodeChoice:
    """The programs for these requests, and the drafts of the host."""
    batch = plan.shapes.batch_for(len(requests))
    draws = any(request.draws for request in requests)
    of_host: list[Sequence[int]] = []
    if drafters.proposer is not None:
        of_host = [_host_drafts(plan, drafters.proposer, request) for request in requests]
    width = device_width(plan, drafters, requests, batch, wanted=any(of_host))
    if not plan.host_drafts:  # the host only decided whether the device drafts
        of_host = []
    programs = plan.decode_programs(batch, width, any(of_host), draws)
    return DecodeChoice(programs, of_host, (batch, width))


def _host_drafts(plan: Plan, proposer: HostProposer, request: Request) -> Sequence[int]:
    """The host's drafts for a request. They leave at least the last token of its budget to the
    target."""
    left = request.params.max_tokens - request.num_tokens
    room = min(plan.width, left) - 1
    return proposer.propose(request.id, room) if room > 0 and request.params.speculate else ()


def device_width(
    plan: Plan, drafters: Drafters, requests: Sequence[Request], batch: int, wanted: bool
) -> Width:
    """Tokens per request of a step in which the device drafts; 1 if it does not."""
    if plan.proposer is None or not any(request.params.speculate for request in requests):
        return 1
    if drafters.adaptive is not None and plan.widths_of(batch):
        return drafters.adaptive.width(batch, [request.id for request in requests])
    host_decides = drafters.proposer is not None and not plan.drafter
    return plan.width if wanted or not host_decides else 1


def decode_inputs(
    device: Device, plan: Plan, choice: DecodeChoice, requests: Sequence[Request]
) -> DecodeInputs:
    """The inputs of the chosen programs, padded to the batch size."""
    programs, batch = choice.programs, (choice.programs.batch,)
    most = programs.drafting.width - 1 if programs.drafting else 0
    slots = device.integers(tuple(request.slot for request in requests), batch, plan.num_slots)
    wanted = tuple(most if request.params.speculate else 0 for request in requests)
    of_host = _drafts_of_host(device, choice) if programs.apart else None
    return DecodeInputs(slots, device.integers(wanted, batch, 0), of_host)


def _drafts_of_host(device: Device, choice: DecodeChoice) -> Drafts | None:
    programs, of_host = choice.programs, choice.of_host
    shape = (programs.batch, programs.width - 1)
    if programs.host_drafts:
        lengths = device.integers(tuple(map(len, of_host)), (programs.batch,), 0)
        return Drafts(token_block(of_host, *shape), lengths)
    if programs.takes_host_drafts:
        return Drafts(device.integers((), shape, 0), device.integers((), (programs.batch,), 0))
    return None


def launch_decode(device: Runs, programs: DecodePrograms, inputs: DecodeInputs) -> StepResult:
    """Runs one decode step, or with a `Tracer` traces the programs that it would run."""
    if programs.apart:
        return _launch_apart(device, programs, inputs)
    static = {"drafting": programs.drafting, "draws": programs.draws}
    return device.run(decode_step, inputs.slots, inputs.num_drafts, **static)


def _launch_apart(device: Runs, programs: DecodePrograms, inputs: DecodeInputs) -> StepResult:
    slots, draws = inputs.slots, programs.draws
    drafts = _draft(device, programs, inputs)
    num_tokens = programs.drafting.num_tokens if programs.drafting else None
    verified = device.run(verify_step, slots, drafts, draws=draws, num_tokens=num_tokens)
    if not programs.accepts_on_host:
        return device.run(accept_step, slots, drafts, verified)
    accepted = device.accept_on_host(drafts, verified)
    return device.run(commit_step, slots, verified, accepted)


def _draft(device: Runs, programs: DecodePrograms, inputs: DecodeInputs) -> Drafts:
    if programs.drafting is None:
        assert inputs.of_host is not None, "a step that drafts nothing needs empty drafts"
        return inputs.of_host
    drafts = device.run(draft_step, inputs.slots, inputs.num_drafts, drafting=programs.drafting)
    if inputs.of_host is None:
        return drafts
    return device.run(replace_step, drafts, inputs.of_host)
