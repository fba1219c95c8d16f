"""The time of a step at every compiled size, measured before the first request."""

import dataclasses
from functools import partial

from jaxspec.engine.adapt.width import Costs
from jaxspec.engine.plan.plan import Plan
from jaxspec.engine.schedule.decode import DecodeInputs, launch_decode
from jaxspec.engine.setup.timing import seconds_per_call
from jaxspec.engine.step.device import Device
from jaxspec.engine.step.io import StepResult

CALLS, ROUNDS = 5, 3


def measure_costs(device: Device, plan: Plan) -> Costs:
    """Seconds of a one-program step by (batch, width), the shortest of several measurements. The
    steps run on the padding slot: their contexts are empty, but weights are read and multiplied as
    in any step."""
    return {
        (batch, width): min(
            seconds_per_call(partial(_run, device, plan, batch, width), CALLS, ROUNDS)
        )
        for batch in plan.shapes.batch_sizes
        for width in plan.widths
    }


def _run(device: Device, plan: Plan, batch: int, width: int) -> StepResult:
    programs = plan.decode_programs(batch, width, host_drafts=False, draws=False)
    # One program, even if the driver runs the parts as separate ones: only the cost matters here.
    programs = dataclasses.replace(programs, apart=False)
    slots = device.integers((), (batch,), plan.num_slots)
    num_drafts = device.integers((), (batch,), width - 1)
    return launch_decode(device, programs, DecodeInputs(slots, num_drafts, None))
