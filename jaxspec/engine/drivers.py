"""The two ways to drive the steps. Both give the same tokens.

lockstep    the host sees drafts and the target's tokens and accepts between two programs;
            to read, and to hold the other against
overlapped  acceptance happens on the device; while a step runs, the host reads the one before
"""

import jax
import numpy as np
from jaxtyping import Array, Int

from jaxspec.acceptance import accept
from jaxspec.engine.inputs import filled
from jaxspec.engine.loop import Loop
from jaxspec.engine.steps import StepResult


def lockstep(loop: Loop) -> None:
    """One step: everything launched is read before the next begins."""
    device = loop.device
    loop.admit()
    loop.read_prompts()
    loop.land_all()
    if not (requests := loop.decoding()):
        return
    slots = loop.slots(requests)
    drafts, num_drafts = draft(loop, slots)
    draws = loop.draws(requests)
    verified = device.run("verify_step", slots, drafts, num_drafts, draws=draws)
    accepted = accept(
        np.asarray(drafts), np.asarray(verified.tokens), np.asarray(verified.num_drafts)
    )
    loop.fly(requests, device.run("commit_step", slots, verified, jax.device_put(accepted)))
    loop.land_all()


def overlapped(loop: Loop) -> None:
    """One step: it is launched first, then the results of the step before are read."""
    loop.admit()
    before = len(loop.flights)
    loop.read_prompts()
    if requests := loop.decoding():
        loop.fly(requests, _decode(loop, loop.slots(requests), loop.draws(requests)))
    loop.land_all(but=len(loop.flights) - before)


DRIVERS = {"lockstep": lockstep, "overlapped": overlapped}


def draft(
    loop: Loop, slots: Int[Array, " rows"]
) -> tuple[Int[Array, "rows drafts"], Int[Array, " rows"]]:
    """Drafts and their number: a block from the drafter, or none in a block as wide."""
    num_drafts = loop.plan.width - 1
    if loop.plan.method == "dflash":
        return loop.device.run("draft_step", slots), filled((slots.size,), num_drafts)
    return filled((slots.size, num_drafts), 0), filled((slots.size,), 0)


def _decode(loop: Loop, slots: Int[Array, " rows"], draws: bool) -> StepResult:
    """One program; with `exact` one per phase, the same ones whatever the method."""
    if loop.plan.fused:
        return loop.device.run(loop.plan.fused_step, slots, draws=draws)
    drafts, num_drafts = draft(loop, slots)
    verified = loop.device.run("verify_step", slots, drafts, num_drafts, draws=draws)
    return loop.device.run("accept_step", slots, drafts, verified)
