"""What a step costs at every compiled size, measured before any request is served."""

import dataclasses
import time
from collections.abc import Callable
from functools import partial

import jax

from jaxspec.engine.adapt.width import Costs
from jaxspec.engine.plan.plan import Plan
from jaxspec.engine.schedule.decode import DecodeInputs, launch_decode
from jaxspec.engine.step.device import Device
from jaxspec.engine.step.io import StepResult

RUNS, ROUNDS = 5, 3
"""Steps that are launched one after the other, as the engine's loop does, and how often."""


def measure_costs(device: Device, plan: Plan) -> Costs:
    """The least seconds of one-program steps by (batch, width), on the padding slot: weights are
    read and multiplied as ever, contexts are empty."""
    return {
        (batch, width): _seconds(partial(_run, device, plan, batch, width))
        for batch in plan.shapes.batch_sizes
        for width in plan.widths
    }


def _seconds(run: Callable[[], StepResult]) -> float:
    """Seconds of one of several asynchronous runs in a row, in the best of a few rounds."""
    jax.block_until_ready(run())
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        results = [run() for _ in range(RUNS)]
        jax.block_until_ready(results)
        times.append((time.perf_counter() - begin) / RUNS)
    return min(times)


def _run(device: Device, plan: Plan, batch: int, width: int) -> StepResult:
    programs = plan.decode_programs(batch, width, host_drafts=False, draws=False)
    # As one program even with a driver that runs the parts apart: only its cost matters.
    programs = dataclasses.replace(programs, apart=False)
    slots = device.integers((), (batch,), plan.num_slots)
    num_drafts = device.integers((), (batch,), width - 1)
    return launch_decode(device, programs, DecodeInputs(slots, num_drafts, None))
