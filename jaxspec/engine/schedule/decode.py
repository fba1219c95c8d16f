"""One decode step: which programs it runs for these requests, and running them."""

import dataclasses
from collections.abc import Sequence

import jax
from jaxtyping import Array, Int

from jaxspec.engine.adapt.width import AdaptiveWidth
from jaxspec.engine.plan.plan import DecodePrograms, Plan
from jaxspec.engine.requests.request import Request
from jaxspec.engine.step.device import Device, Tracer
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
    """What the programs of one decode step take."""

    slots: Int[Array, " batch"]
    num_drafts: Int[Array, " batch"]
    """Drafts wanted from the device, for every request."""
    of_host: Drafts | None
    """Drafts of the host; without any, empty ones if the target is to read a whole block anyway.
    None if the device's are not to be replaced."""


@dataclasses.dataclass
class Drafters:
    """Who decides on the host what is drafted."""

    proposer: HostProposer | None
    adaptive: AdaptiveWidth | None

    @property
    def all(self) -> list[HostProposer | AdaptiveWidth]:
        return [one for one in (self.proposer, self.adaptive) if one is not None]


def choose_decode(
    plan: Plan, drafters: Drafters, requests: Sequence[Request]
) -> tuple[DecodePrograms, list[Sequence[int]]]:
    """The programs for these requests, and the drafts that the host proposes for each of them."""
    batch = plan.shapes.batch_for(len(requests))
    draws = any(request.params.draws for request in requests)
    of_host = [_host_drafts(plan, drafters.proposer, request) for request in requests]
    width = _device_width(plan, drafters, requests, batch, wanted=any(of_host))
    if not plan.host_drafts:  # the host only decided whether the device drafts
        of_host = []
    return plan.decode_programs(batch, width, any(of_host), draws), of_host


def _host_drafts(plan: Plan, proposer: HostProposer | None, request: Request) -> Sequence[int]:
    """No longer than the budget: the last token is the target's own."""
    left = request.params.max_tokens - len(request.token_ids)
    room = min(plan.width, left) - 1
    if proposer is None or room < 1 or not request.params.speculate:
        return ()
    return proposer.propose(request.id, room)


def _device_width(
    plan: Plan, drafters: Drafters, requests: Sequence[Request], batch: int, wanted: bool
) -> int:
    """Tokens per request of a step in which the device drafts; 1 if it does not."""
    if plan.proposer is None or not any(request.params.speculate for request in requests):
        return 1
    if drafters.adaptive is not None:
        return drafters.adaptive.width(batch, [request.id for request in requests])
    asks_host = drafters.proposer is not None and not plan.drafter
    return plan.width if wanted or not asks_host else 1


def decode_inputs(
    device: Device,
    plan: Plan,
    programs: DecodePrograms,
    requests: Sequence[Request],
    of_host: Sequence[Sequence[int]],
) -> DecodeInputs:
    """As the programs take them, padded to the batch size."""
    batch, most = (programs.batch,), programs.drafting.width - 1 if programs.drafting else 0
    wanted = tuple(most if request.params.speculate else 0 for request in requests)
    return DecodeInputs(
        slots=device.integers(tuple(request.slot for request in requests), batch, plan.num_slots),
        num_drafts=device.integers(wanted, batch, 0),
        of_host=_drafts_of_host(device, programs, of_host),
    )


def _drafts_of_host(
    device: Device, programs: DecodePrograms, of_host: Sequence[Sequence[int]]
) -> Drafts | None:
    shape = (programs.batch, programs.width - 1)
    if programs.host_drafts:
        lengths = device.integers(tuple(map(len, of_host)), (programs.batch,), 0)
        return Drafts(token_block(of_host, *shape), lengths)
    if programs.drafting is None:
        return Drafts(device.integers((), shape, 0), device.integers((), (programs.batch,), 0))
    return None


def launch_decode(
    device: Device | Tracer, programs: DecodePrograms, inputs: DecodeInputs
) -> StepResult:
    """Runs one decode step, or with a `Tracer` traces the programs that it would run."""
    slots, draws = inputs.slots, programs.draws
    if not programs.apart:
        drafting = programs.drafting
        return device.run(decode_step, slots, inputs.num_drafts, drafting=drafting, draws=draws)
    drafts = _draft(device, programs, inputs)
    verified = device.run(verify_step, slots, drafts, draws=draws)
    if not programs.accepts_on_host:
        return device.run(accept_step, slots, drafts, verified)
    accepted = device.accept_on_host(drafts, verified)
    return device.run(commit_step, slots, verified, accepted)


def _draft(device: Device | Tracer, programs: DecodePrograms, inputs: DecodeInputs) -> Drafts:
    if programs.drafting is None:
        assert inputs.of_host is not None, "no drafts, not even empty ones"
        return inputs.of_host
    drafts = device.run(draft_step, inputs.slots, inputs.num_drafts, drafting=programs.drafting)
    if inputs.of_host is None:
        return drafts
    return device.run(replace_step, drafts, inputs.of_host)
