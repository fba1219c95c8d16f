"""The programs that the first steps need, so that they can be compiled side by side."""

import dataclasses
from collections.abc import Iterator, Sequence

import jax

from jaxspec.engine.engine import Engine
from jaxspec.engine.plan import Plan
from jaxspec.engine.shapes import Shapes
from jaxspec.engine.warmup import Program, every_program


def first_programs(
    engine: Engine, prompts: Sequence[Sequence[int]], draws: bool
) -> Iterator[jax.stages.Lowered]:
    """Of the first prompts to be seated, while nobody has ended; what else comes up is compiled
    when it does."""
    device, plan = engine.loop.device, _for_first(engine.loop.plan, prompts)
    for program in every_program(device, plan, draws):
        if not _is_spare(plan, program):
            step, inputs, static = program
            yield device.lower(step, *inputs, **static)


def _for_first(plan: Plan, prompts: Sequence[Sequence[int]]) -> Plan:
    lengths = [len(prompt) for prompt in prompts[: plan.num_slots]]
    rows, prefill = plan.shapes.rows_for(len(lengths)), plan.shapes.prefill_for(lengths)
    return dataclasses.replace(plan, shapes=Shapes((rows,), (prefill,)))


def _is_spare(plan: Plan, program: Program) -> bool:
    """Steps without drafts, where the drafter drafts in every step."""
    step, inputs, _ = program
    plain = step == "plain_step" or step == "verify_step" and not inputs[1].shape[1]
    return plan.drafter and not plan.tiers and not plan.exact and plain
