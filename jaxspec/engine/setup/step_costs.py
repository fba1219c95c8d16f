"""The time of a step at every compiled size, measured before the first request."""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp

from jaxspec.engine.adapt.beside import cost_of_tokens
from jaxspec.engine.adapt.even import Width, tokens_each
from jaxspec.engine.adapt.loop_costs import Costs, Size
from jaxspec.engine.plan.plan import DecodePrograms, Plan
from jaxspec.engine.schedule.decode import DecodeInputs, launch_decode
from jaxspec.engine.setup.timing import seconds_per_call
from jaxspec.engine.setup.warmup import compile_side_by_side
from jaxspec.engine.step.compiled import Program
from jaxspec.engine.step.device import Device, Tracer
from jaxspec.engine.step.io import StepResult

CALLS, ROUNDS = 5, 3


def measure_costs(device: Device, plan: Plan) -> Costs:
    """Seconds of a one-program step by (batch, width), the shortest of several measurements. The
    steps run on the padding slot: their contexts are empty, but weights are read and multiplied as
    in any step."""
    sizes = [
        (batch, width) for batch in plan.shapes.batch_sizes for width in plan.choices_of(batch)
    ]
    compile_side_by_side(_programs_of(device, plan, sizes))
    return {
        size: min(seconds_per_call(partial(_run, device, plan, *size), CALLS, ROUNDS))
        for size in sizes
    }


def costs_beside(plan: Plan, costs: Costs) -> Costs:
    """Estimated seconds of the steps that also read part of a prompt, by (batch, width). Measuring
    them would make the engine wait for their programs, which no step needs."""
    return {
        (batch, width): cost_of_tokens(batch, batch * width + plan.beside, costs)
        for batch in plan.mixed_sizes
        if plan.widths_of(batch)
        for width in plan.mixed_widths(batch)
    }


def _programs_of(device: Device, plan: Plan, sizes: Sequence[Size]) -> Iterator[Program]:
    for batch, width in sizes:
        tracer = Tracer(device.programs)
        inputs = jax.eval_shape(partial(_no_inputs, batch))
        launch_decode(tracer, _one_program(plan, batch, width), inputs)
        yield from tracer.programs.values()


def _run(device: Device, plan: Plan, batch: int, width: Width) -> StepResult:
    slots = device.integers((), (batch,), plan.num_slots)
    num_drafts = device.integers((), (batch,), tokens_each(width) - 1)
    inputs = DecodeInputs(slots, num_drafts, None)
    return launch_decode(device, _one_program(plan, batch, width), inputs)


def _no_inputs(batch: int) -> DecodeInputs:
    integers = jnp.zeros(batch, jnp.int32)
    return DecodeInputs(integers, integers, None)


def _one_program(plan: Plan, batch: int, width: Width) -> DecodePrograms:
    """The step as one program, even if the driver runs several: only the cost matters here."""
    programs = plan.decode_programs(batch, width, host_drafts=False, draws=False)
    return dataclasses.replace(programs, apart=False)
