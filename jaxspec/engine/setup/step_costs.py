"""What a step costs at every compiled size, measured before the first request."""

from functools import partial

from jaxspec.engine.adapt.width import Costs
from jaxspec.engine.plan.plan import Plan
from jaxspec.engine.setup.timing import seconds_per_call
from jaxspec.engine.step.programs import Device
from jaxspec.engine.step.upload import filled

CALLS, ROUNDS = 5, 3


def measure_costs(device: Device, plan: Plan) -> Costs:
    """Least seconds of one-program steps on the padding slot: weights are read and multiplied as
    ever, contexts are empty."""
    return {
        (rows, width): min(
            seconds_per_call(partial(_run, device, plan, rows, width), CALLS, ROUNDS)
        )
        for rows in plan.shapes.row_buckets
        for width in plan.tiers
    }


def _run(device: Device, plan: Plan, rows: int, width: int) -> object:
    slots = filled((rows,), plan.num_slots)
    if width == 1:
        return device.run("plain_step", slots, draws=False)
    num_drafts = filled((rows,), width - 1)
    return device.run("spec_step", slots, num_drafts, draws=False, **plan.tier(width))
