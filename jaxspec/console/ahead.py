"""The programs that the first steps need, compiled side by side before any step."""

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
    """Side by side; one after another, as they come up, would leave cores idle."""
    compile_side_by_side(_first_programs(engine, _that_fit(engine, prompts, params), params.draws))


def _that_fit(
    engine: Engine, prompts: Sequence[list[int]], params: SamplingParams
) -> list[list[int]]:
    """Those that can ever run; where none can, nothing needs to be compiled to say so."""
    refusals = [engine.refusal(prompt, params) for prompt in prompts]
    if all(refusals):
        raise UsageError(refusals[0])
    return [prompt for prompt, refusal in zip(prompts, refusals) if refusal is None]


def _first_programs(
    engine: Engine, prompts: Sequence[Sequence[int]], draws: bool
) -> Iterator[jax.stages.Lowered]:
    """Of the first prompts to be seated, while nobody has ended; what else comes up is compiled
    when it does."""
    device, plan = engine.loop.device, _for_first(engine.loop.plan, prompts)
    for step, inputs, static in needed_programs(device, plan, draws):
        yield device.lower(step, *inputs, **static)


def _for_first(plan: Plan, prompts: Sequence[Sequence[int]]) -> Plan:
    lengths = [len(prompt) for prompt in prompts[: plan.num_slots]]
    rows, prefill = plan.shapes.rows_for(len(lengths)), plan.shapes.prefill_for(lengths)
    return dataclasses.replace(plan, shapes=Shapes((rows,), (prefill,)))
