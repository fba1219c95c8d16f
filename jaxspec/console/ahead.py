"""Compiles the programs that the first steps need, in parallel, before any step runs."""

import dataclasses
from collections.abc import Iterator, Sequence

import jax

from jaxspec.engine.engine import Engine
from jaxspec.engine.plan.plan import Plan
from jaxspec.engine.plan.shapes import Shapes
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.engine.setup.warmup import compile_side_by_side, needed_programs
from jaxspec.errors import UsageError


def compile_ahead(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams) -> None:
    """Compiles in parallel; one after another, when a step needs them, would leave cores idle."""
    compile_side_by_side(_first_programs(engine, _that_fit(engine, prompts, params), params.draws))


def _that_fit(
    engine: Engine, prompts: Sequence[list[int]], params: SamplingParams
) -> list[list[int]]:
    """The prompts that can run at all; if there are none, nothing needs to be compiled."""
    refusals = [engine.refusal(prompt, params) for prompt in prompts]
    if all(refusals):
        raise UsageError(refusals[0])
    return [prompt for prompt, refusal in zip(prompts, refusals) if refusal is None]


def _first_programs(
    engine: Engine, prompts: Sequence[Sequence[int]], draws: bool
) -> Iterator[jax.stages.Lowered]:
    """The programs of the first prompts that get a slot, until one of them ends; any others are
    compiled when a step needs them."""
    device, plan = engine.loop.device, _for_first(engine.loop.plan, prompts)
    for step, inputs, static in needed_programs(device, plan, draws):
        yield device.lower(step, *inputs, **static)


def _for_first(plan: Plan, prompts: Sequence[Sequence[int]]) -> Plan:
    lengths = [len(prompt) for prompt in prompts[: plan.num_slots]]
    rows, prefill = plan.shapes.rows_for(len(lengths)), plan.shapes.prefill_for(lengths)
    return dataclasses.replace(plan, shapes=Shapes((rows,), (prefill,)))
