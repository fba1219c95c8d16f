"""The two ways to drive the steps. Both give the same tokens.

lockstep    the host sees drafts and the target's tokens and accepts between two programs;
            to read, and to hold the other against
overlapped  acceptance happens on the device; while a step runs, the host reads the one before
"""

import jax
import numpy as np

from jaxspec.acceptance import accept
from jaxspec.engine.requests.request import Request
from jaxspec.engine.schedule.drafting import draft, propose
from jaxspec.engine.schedule.loop import Loop
from jaxspec.engine.step.io import StepResult
from jaxspec.engine.step.upload import padded


def lockstep(loop: Loop) -> None:
    """One step: everything launched is read before the next begins."""
    device = loop.device
    loop.admit()
    loop.read_prompts()
    loop.land_all()
    if not (requests := loop.decoding()):
        return
    slots = loop.slots(requests)
    draws = loop.draws(requests)
    drafts = draft(loop, slots, propose(loop, requests), draws)
    verified = device.run(
        "verify_step", slots, drafts.tokens, drafts.num_drafts, drafts.logits, draws=draws
    )
    accepted = accept(
        np.asarray(drafts.tokens), np.asarray(verified.tokens), np.asarray(verified.num_drafts)
    )
    loop.fly(requests, device.run("commit_step", slots, verified, jax.device_put(accepted)))
    loop.land_all()


def overlapped(loop: Loop) -> None:
    """One step: it is launched first, then the results of the step before are read.

    A method that proposes on the host has to read those first.
    """
    loop.admit()
    before = len(loop.flights)
    loop.read_prompts()
    if loop.plan.host:
        loop.land_all()
        before = 0
    if requests := loop.decoding():
        loop.fly(requests, _decode(loop, requests))
    loop.land_all(but=len(loop.flights) - before)


DRIVERS = {"lockstep": lockstep, "overlapped": overlapped}


def _decode(loop: Loop, requests: list[Request]) -> StepResult:
    """One program where the host proposes nothing; with `exact` one per phase, the same ones
    whatever the method."""
    run, slots, draws = loop.device.run, loop.slots(requests), loop.draws(requests)
    proposals = propose(loop, requests)
    if loop.plan.exact or any(proposals.from_host):
        drafts = draft(loop, slots, proposals, draws)
        verified = run(
            "verify_step", slots, drafts.tokens, drafts.num_drafts, drafts.logits, draws=draws
        )
        return run("accept_step", slots, drafts.tokens, verified)
    if any(proposals.from_device):
        num_drafts = padded(proposals.from_device, slots.size, 0)
        if loop.plan.lookup:
            return run("lookup_spec_step", slots, num_drafts, lookup=loop.plan.lookup, draws=draws)
        tier = proposals.tier(loop.plan)
        if draws and loop.plan.drawn_drafts:
            return run("drawn_spec_step", slots, num_drafts, **tier)
        return run("spec_step", slots, num_drafts, draws=draws, **tier)
    return run("plain_step", slots, draws=draws)
