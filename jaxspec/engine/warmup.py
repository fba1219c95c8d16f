"""Every program an engine can need, compiled before it is needed."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import ShapeDtypeStruct as Shape

from jaxspec.engine.inputs import prompt_chunk
from jaxspec.engine.plan import Plan
from jaxspec.engine.programs import Device
from jaxspec.engine.steps import PromptChunk, Seat
from jaxspec.sampling import SlotSampling

Program = tuple[str, tuple[Any, ...], dict[str, bool]]
"""Name of a step, shapes of its inputs, static choices."""


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


def _needed(device: Device, step: str, inputs: tuple[Any, ...], static: dict[str, bool]) -> int:
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


def _decode_programs(device: Device, plan: Plan, slots: Shape, draws: bool) -> Iterator[Program]:
    """What one decode step runs, in its order."""
    static = {"draws": draws}
    overlapped, drawn = plan.driver == "overlapped", draws and plan.drawn_drafts and plan.drafter
    if overlapped and not plan.exact:
        yield "plain_step", (slots,), static
        if plan.drafter and drawn:
            yield "drawn_spec_step", (slots, slots), {}
        elif plan.drafter:
            yield "spec_step", (slots, slots), static
        if not plan.host:
            return
    drafts = Shape((*slots.shape, plan.width - 1), np.int32)
    logits = None
    if drawn:
        yield "drawn_draft_step", (slots,), {}
        _, (_, logits) = device.lower("drawn_draft_step", slots).out_info
    elif plan.drafter:
        yield "draft_step", (slots,), {}
    if plan.drafter and plan.host:
        yield "replace_step", (drafts, slots, drafts, slots, logits), {}
    widths = {plan.width} if plan.exact or overlapped else {1, plan.width}
    for width in sorted(widths):
        drafts = Shape((*slots.shape, width - 1), np.int32)
        verify = (slots, drafts, slots, logits if width > 1 else None)
        yield from _verify_programs(device, plan, verify, static)


def _verify_programs(
    device: Device, plan: Plan, verify: tuple[Any, ...], static: dict[str, bool]
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
