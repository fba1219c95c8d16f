"""What a step costs at every compiled size, measured before anybody is served."""

import time

import jax

from jaxspec.engine.adapt.width import Costs
from jaxspec.engine.plan.plan import Plan
from jaxspec.engine.step.programs import Device
from jaxspec.engine.step.upload import filled

RUNS, ROUNDS = 5, 3
"""Steps that are launched one after the other, as the engine's loop does, and how often."""


def measure_costs(device: Device, plan: Plan) -> Costs:
    """Least seconds of one-program steps, on the slot that nobody has: weights are read and
    multiplied as ever, contexts are empty."""
    return {
        (rows, width): _seconds(device, plan, rows, width)
        for rows in plan.shapes.row_buckets
        for width in plan.tiers
    }


def _seconds(device: Device, plan: Plan, rows: int, width: int) -> float:
    jax.block_until_ready(_run(device, plan, rows, width))
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(RUNS):
            result = _run(device, plan, rows, width)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - begin) / RUNS)
    return min(times)


def _run(device: Device, plan: Plan, rows: int, width: int) -> object:
    slots = filled((rows,), plan.num_slots)
    if width == 1:
        return device.run("plain_step", slots, draws=False)
    num_drafts = filled((rows,), width - 1)
    return device.run("spec_step", slots, num_drafts, draws=False, **plan.tier(width))
