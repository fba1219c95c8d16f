"""The programs that the first steps need, so that they can be compiled side by side."""

import dataclasses
from collections.abc import Iterator, Sequence

import jax

from jaxspec.engine.engine import Engine
from jaxspec.engine.plan import Plan
from jaxspec.engine.shapes import Shapes
from jaxspec.engine.warmup import needed_programs


def first_programs(
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
