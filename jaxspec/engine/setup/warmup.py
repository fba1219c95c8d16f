"""Every program that an engine can need, made ready before it is needed."""

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.engine.plan.plan import DecodePrograms, Plan, Shapes
from jaxspec.engine.schedule.beside import launch_mixed, shapes_of_inputs
from jaxspec.engine.schedule.decode import DecodeInputs, launch_decode
from jaxspec.engine.schedule.prefill import chunks_of
from jaxspec.engine.step.compiled import Program, Programs
from jaxspec.engine.step.device import Device, Runs, Tracer
from jaxspec.engine.step.packed import ADMISSION_COLUMNS, PackedAdmission
from jaxspec.engine.step.steps import admit_step, copy_step, prefill_step
from jaxspec.engine.step.upload import prompt_chunk
from jaxspec.proposers.device import no_drafts
from pallas_kernels.kept import lowered_by_workers

COMPILERS = 8
"""Number of programs that are compiled at the same time."""


def every_program(
    of: Programs, plan: Plan, draws: bool, only_needed: bool = False, scores: bool = False
) -> Iterator[Program]:
    """Every program, in the order in which a first request needs them. `only_needed` leaves out
    steps without drafts if the drafter drafts in every step; `scores` adds the programs for log
    probabilities of prompts."""
    tracer, yielded = Tracer(of), 0
    for trace in every_run(plan, draws, only_needed, scores):
        trace(tracer)
        programs = list(tracer.programs.values())
        yield from programs[yielded:]
        yielded = len(programs)


def every_run(plan: Plan, draws: bool, only_needed: bool, scores: bool) -> Iterator[Any]:
    """Functions that each run a step of the loop on a device, or on what takes its place, given the
    shapes of its inputs. Together they run all programs."""
    yield lambda device: device.run(admit_step, _admission(plan))
    if plan.num_snapshots:
        row = jax.ShapeDtypeStruct((), jnp.int32)
        yield lambda device: device.run(copy_step, row, row)
    scored = (False, True) if scores else (False,)
    for (batch, width), score in itertools.product(plan.shapes.prefill_shapes, scored):
        empty = partial(prompt_chunk, [], batch, width, padding_slot=0, scored=score)
        chunk = jax.eval_shape(empty)
        yield lambda device, chunk=chunk: device.run(prefill_step, chunk, draws=draws or plan.exact)
    for programs in plan.every_decode(draws, only_needed):
        yield partial(_launch, programs=programs)


def _launch(device: Runs, programs: DecodePrograms) -> None:
    if programs.beside:
        launch_mixed(device, programs, *shapes_of_inputs(programs))
    else:
        launch_decode(device, programs, _decode_inputs(programs))


def for_first_prompts(plan: Plan, prompts: Sequence[Sequence[int]]) -> Plan:
    """The plan reduced to the sizes of the steps of these prompts until the first request ends.
    None of these steps reads prompts while it decodes."""
    lengths = [len(prompt) for prompt in prompts[: plan.num_slots]]
    chunks = chunks_of(plan.shapes, lengths, plan.prefill_budget, plan.saves_every)
    used = {(chunk.batch, chunk.width) for chunk in chunks}
    prefill = tuple(shape for shape in plan.shapes.prefill_shapes if shape in used)
    batch = plan.shapes.batch_for(len(lengths))
    return dataclasses.replace(plan, shapes=Shapes((batch,), prefill), beside=0)


def make_first_programs(
    device: Device, plan: Plan, prompts: Sequence[Sequence[int]], draws: bool, scores: bool = False
) -> bool:
    """Makes the programs for the first steps of these prompts. Returns False if that was done
    before."""
    first = for_first_prompts(plan, prompts)
    sizes = first.shapes, draws, scores
    if sizes in device.prepared:
        return False
    programs = every_program(device.programs, first, draws, only_needed=True, scores=scores)
    compile_side_by_side(_waited_for(device, programs))
    device.prepared.add(sizes)
    return True


def _waited_for(device: Device, programs: Iterable[Program]) -> Iterator[Program]:
    """The same programs. If one of them is not ready, the log says that requests wait for it."""
    for program in programs:
        if not program.is_ready:
            device.tell_of_waiting()
        yield program


def compile_side_by_side(
    programs: Iterable[Program], progress: Callable[[int, int], None] | None = None
) -> int:
    """Makes programs ready to run, and returns their number.

    They are traced one after the other, and loaded or lowered and compiled a few at a time; other
    processes lower their kernels. `progress` is called with the number of programs that are ready
    and the number that are known so far.
    """
    pool = ThreadPoolExecutor(min(COMPILERS, os.cpu_count() or 1))
    try:
        with lowered_by_workers():
            making = []
            for program in programs:
                program.prepare()
                making.append(pool.submit(program.make))
                if progress is not None:
                    progress(sum(one.done() for one in making), len(making))
            # Wait here, not in `shutdown`: if an interrupt hits the join of a thread, the thread
            # outlives the interpreter and aborts the process.
            for ready, one in enumerate(making, 1):
                one.result()
                if progress is not None:
                    progress(ready, len(making))
            return len(making)
    finally:
        pool.shutdown(cancel_futures=True)


def _decode_inputs(programs: DecodePrograms) -> DecodeInputs:
    def inputs() -> DecodeInputs:
        integers = jnp.zeros(programs.batch, jnp.int32)
        of_host = None
        if programs.takes_host_drafts:
            of_host = no_drafts(programs.batch, programs.width)
        return DecodeInputs(integers, integers, of_host)

    return jax.eval_shape(inputs)


def _admission(plan: Plan) -> PackedAdmission:
    def admission() -> PackedAdmission:
        batch = plan.admitted_at_once
        columns = ADMISSION_COLUMNS + plan.max_pages + (plan.recalled_positions or 0)
        integers, fractions = jnp.zeros((batch, columns), jnp.int32), jnp.zeros((batch, 3))
        return PackedAdmission(integers, fractions, plan.max_pages)

    return jax.eval_shape(admission)
