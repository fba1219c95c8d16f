"""Every program an engine can need, compiled before it is needed."""

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


def temporaries(device: Device, plan: Plan) -> int:
    """Compiles every program and says how many bytes the greediest needs beside its arguments."""
    most = 0
    for step, inputs in every_program(device, plan):
        needed = device.lower(step, *inputs).compile().memory_analysis()
        fresh = needed.output_size_in_bytes - needed.alias_size_in_bytes
        most = max(most, needed.temp_size_in_bytes + fresh)
    return most


def every_program(device: Device, plan: Plan) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Name and input shapes of every step at every size."""
    yield "seat_step", (_seat(plan),)
    for rows, width in plan.shapes.prefill_shapes:
        yield "prefill_step", (_chunk(rows, width),)
    for rows in plan.shapes.row_buckets:
        yield from _decode_programs(device, plan, Shape((rows,), np.int32))


def _decode_programs(
    device: Device, plan: Plan, slots: Shape
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """What one decode step runs, in its order."""
    if plan.fused:
        yield plan.fused_step, (slots,)
        return
    drafts = Shape((*slots.shape, plan.width - 1), np.int32)
    if plan.method == "dflash":
        yield "draft_step", (slots,)
    verify = (slots, drafts, slots)
    yield "verify_step", verify
    _, verified = device.lower("verify_step", *verify).out_info
    if plan.driver == "lockstep":
        yield "commit_step", (slots, verified, slots)
    else:
        yield "accept_step", (slots, drafts, verified)


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
            logprobs=integer,
        )

    return jax.eval_shape(seat)


def _chunk(rows: int, width: int) -> PromptChunk:
    return jax.eval_shape(lambda: prompt_chunk([], rows, width, padding_slot=0))
