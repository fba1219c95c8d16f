"""Every program an engine can need, compiled before it is needed."""

import dataclasses
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import ShapeDtypeStruct as Shape

from jaxspec.engine.plan.plan import Plan
from jaxspec.engine.step.io import PromptChunk, Seat
from jaxspec.engine.step.programs import Device
from jaxspec.engine.step.upload import prompt_chunk
from jaxspec.sampling import SlotSampling

Program = tuple[str, tuple[Any, ...], dict[str, Any]]
"""Name of a step, shapes of its inputs, static choices."""
COMPILERS = 8
"""Programs that are compiled at once."""


def temporaries(device: Device, plan: Plan) -> int:
    """Compiles the programs and says how many bytes the greediest needs beside its arguments.

    Of those that draw only the largest are compiled: they are many and seldom all needed.
    """
    largest = dataclasses.replace(plan, shapes=plan.shapes.largest)
    programs = [
        *every_program(device, plan, draws=False),
        *every_program(device, largest, draws=True),
    ]
    return max(_needed(device, *program) for program in programs)


def _needed(device: Device, step: str, inputs: tuple[Any, ...], static: dict[str, Any]) -> int:
    analysis = device.lower(step, *inputs, **static).compile().memory_analysis()
    fresh = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return analysis.temp_size_in_bytes + fresh


def every_program(device: Device, plan: Plan, draws: bool) -> Iterator[Program]:
    """Every step at every size; compiling their lowerings is what running them would do."""
    yield "seat_step", (_seat(plan),), {}
    for rows, width in plan.shapes.prefill_shapes:
        yield "prefill_step", (_chunk(rows, width),), {"draws": draws or plan.exact}
    for rows in plan.shapes.row_buckets:
        yield from _decode_programs(device, plan, Shape((rows,), np.int32), draws or plan.exact)


def needed_programs(device: Device, plan: Plan, draws: bool) -> Iterator[Program]:
    """Without those in which nobody drafts, where the drafter drafts in every step."""
    always = plan.drafter and not plan.tiers and not plan.exact
    for step, inputs, static in every_program(device, plan, draws):
        nobody = step == "plain_step" or step == "verify_step" and not inputs[1].shape[1]
        if not (always and nobody):
            yield step, inputs, static


def compile_side_by_side(programs: Iterable[jax.stages.Lowered]) -> int:
    """A few at a time, while the next are lowered: compiling one keeps one core busy."""
    pool = ThreadPoolExecutor(min(COMPILERS, os.cpu_count() or 1))
    try:
        compiling = [pool.submit(program.compile) for program in programs]
        # Waited for here: a thread whose join is interrupted outlives the interpreter, and aborts.
        return len([program.result() for program in compiling])
    finally:
        pool.shutdown(cancel_futures=True)


def _decode_programs(device: Device, plan: Plan, slots: Shape, draws: bool) -> Iterator[Program]:
    """What one decode step runs, in its order."""
    static = {"draws": draws}
    overlapped, drawn = plan.driver == "overlapped", draws and plan.drawn_drafts and plan.drafter
    if overlapped and not plan.exact:
        yield "plain_step", (slots,), static
        if plan.lookup:
            yield "lookup_spec_step", (slots, slots), static | {"lookup": plan.lookup}
        for tier in _drafted_tiers(plan):
            if drawn:
                yield "drawn_spec_step", (slots, slots), tier
            else:
                yield "spec_step", (slots, slots), static | tier
        if not plan.host:
            return
    if plan.lookup:
        yield "lookup_step", (slots, slots), {"lookup": plan.lookup}
    block = Shape((*slots.shape, plan.width - 1), np.int32)
    drafted = {plan.width: (block, None)}
    for tier in _drafted_tiers(plan):
        name = "drawn_draft_step" if drawn else "draft_step"
        yield name, (slots,), tier
        _, found = device.lower(name, slots, **tier).out_info
        drafts, logits = found if drawn else (found, None)
        drafted[drafts.shape[1] + 1] = (drafts, logits)
    if plan.drafter and plan.host:
        drafts, logits = drafted[plan.width]
        yield "replace_step", (drafts, slots, drafts, slots, logits), {}
    if not (plan.exact or overlapped):
        drafted[1] = (Shape((*slots.shape, 0), np.int32), None)
    for drafts, logits in drafted.values():
        yield from _verify_programs(device, plan, (slots, drafts, slots, logits), static)


def _drafted_tiers(plan: Plan) -> list[dict[str, int]]:
    """How the drafter is asked for each width that it may have to draft."""
    widths = [width for width in plan.tiers or (plan.width,) if width > 1]
    return [plan.tier(width) for width in widths] if plan.drafter else []


def _verify_programs(
    device: Device, plan: Plan, verify: tuple[Any, ...], static: dict[str, int]
) -> Iterator[Program]:
    slots, drafts, *_ = verify
    yield "verify_step", verify, static
    _, verified = device.lower("verify_step", *verify, **static).out_info
    if plan.driver == "lockstep":
        yield "commit_step", (slots, verified, slots), {}
    else:
        yield "accept_step", (slots, drafts, verified), {}


def _seat(plan: Plan) -> Seat:
    def seat() -> Seat:
        integer, number = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32)
        return Seat(
            slot=integer,
            pages=jnp.zeros(plan.max_pages, jnp.int32),
            limit=integer,
            sampling=SlotSampling(
                temperature=number,
                top_k=integer,
                top_p=number,
                min_p=number,
                seed=jnp.zeros((), jnp.uint32),
            ),
        )

    return jax.eval_shape(seat)


def _chunk(rows: int, width: int) -> PromptChunk:
    return jax.eval_shape(lambda: prompt_chunk([], rows, width, padding_slot=0))
