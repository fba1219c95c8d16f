"""Runs a kernel on arrays: thread blocks one after the other, and the warps of a block in turn,
each until it waits for another."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ptx import arithmetic, converting, copies, lanes, matrices, moving, waiting
from ptx.copies import Box
from ptx.host import Launch, OfArray
from ptx.memory import PARAMETERS, Global, Memory, shared_of
from ptx.operands import Context, Step, place_of_parameter
from ptx.parse import ALIGNMENT, Instruction, Kernel
from ptx.refusal import Refused, WrongAccess, require
from ptx.state import LANES, Block, Warp

INSTRUCTIONS: dict[str, Callable[[Context], Step]] = {}
for module in (arithmetic, converting, copies, lanes, matrices, moving, waiting):
    INSTRUCTIONS |= module.INSTRUCTIONS
ALL_LANES = np.ones(LANES, bool)


class Line(NamedTuple):
    """An instruction that is ready to run."""

    act: Callable[[Warp], None]
    instruction: Instruction


def run(
    kernel: Kernel, launch: Launch, arrays: Sequence[np.ndarray], chosen: range | None = None
) -> None:
    """Runs a kernel, which reads and writes the arrays in place. An array may be given more than
    once. Only the chosen thread blocks run; all of them if `chosen` is None."""
    lines = [line_of(kernel, one) for one in kernel.code]
    memory, addresses = Global(), {}
    for i, array in enumerate(arrays):
        known = addresses.get(array.ctypes.data)
        addresses[array.ctypes.data] = known or memory.add(f"array {i}", array)
    at = [addresses[array.ctypes.data] for array in arrays]
    size = int(np.prod([max(one, 1) for one in launch.cluster]))
    require(size == 1, "thread blocks in clusters")
    for i in range(int(np.prod(launch.grid))) if chosen is None else chosen:
        block = block_at(i, kernel, launch, memory, at)
        block.cluster = [block]
        run_together([Warp(block, i) for i in range(launch.threads // LANES)], lines)


def block_at(i: int, kernel: Kernel, launch: Launch, memory: Global, at: Sequence[int]) -> Block:
    x, y, _ = launch.grid
    index = i % x, i // x % y, i // (x * y)
    sizes = {f"%nctaid.{axis}": count for axis, count in zip("xyz", launch.grid)}
    sizes |= {"%ntid.x": launch.threads, "%ntid.y": 1, "%ntid.z": 1}
    shared = shared_of(f"shared memory of thread block {index}", ALIGNMENT + launch.shared_bytes)
    parameters, descriptors = parameters_of(kernel, launch, at)
    made = Block(index, sizes, launch.threads, memory, shared, parameters)
    made.descriptors = descriptors
    return made


def parameters_of(kernel: Kernel, launch: Launch, at: Sequence[int]) -> tuple[Memory, dict]:
    require(len(kernel.parameters) == len(launch.parameters), "other parameters than the host's")
    held, descriptors = np.zeros(64 * 256, np.uint8), {}
    absolute = lambda place: at[place.array] + place.offset
    for name, given in zip(kernel.parameters, launch.parameters):
        place = place_of_parameter(kernel, name)
        if isinstance(given, OfArray):
            held[place : place + 8].view(np.uint64)[0] = absolute(given)
        else:
            boxes = {place + i: Box(absolute(one.source), one) for i, one in given.items()}
            descriptors |= boxes
    return Memory("the parameters", held, PARAMETERS), descriptors


def line_of(kernel: Kernel, instruction: Instruction) -> Line:
    name = instruction.op.split(".")[0]
    context = Context(kernel, instruction)
    holds = context.bits(instruction.predicate, 1) if instruction.predicate else None
    mask = mask_of(holds, instruction.unless)
    if name == "bra":
        return Line(branch(kernel.labels[instruction.operands[0]], mask, instruction), instruction)
    if name in ("ret", "exit"):
        return Line(branch(len(kernel.code), mask, instruction), instruction)
    if name not in INSTRUCTIONS:
        raise Refused(f"the instruction {instruction}")
    step = INSTRUCTIONS[name](context)
    if mask is None:
        return Line(lambda warp: step(warp, ALL_LANES), instruction)

    def act(warp: Warp) -> None:
        chosen = mask(warp)
        if chosen.any():
            step(warp, chosen)

    return Line(act, instruction)


def mask_of(holds: Callable | None, unless: bool) -> Callable[[Warp], np.ndarray] | None:
    if holds is None:
        return None
    return (lambda warp: ~holds(warp)) if unless else holds


def branch(target: int, mask: Callable | None, instruction: Instruction) -> Callable[[Warp], None]:
    def act(warp: Warp) -> None:
        chosen = ALL_LANES if mask is None else mask(warp)
        if chosen.any():
            if not chosen.all():
                raise Refused(f"lanes that do not agree at {instruction}")
            warp.at = target

    return act


def run_together(warps: list[Warp], lines: list[Line]) -> None:
    while not all(warp.done for warp in warps):
        ready = [warp for warp in warps if not warp.done and (not warp.waits or warp.waits())]
        if not ready:
            stuck = {str(lines[warp.at - 1].instruction) for warp in warps if not warp.done}
            raise WrongAccess(f"all warps wait for each other at {', '.join(sorted(stuck))}")
        for warp in ready:
            warp.waits = None
            run_until_it_waits(warp, lines)


def run_until_it_waits(warp: Warp, lines: list[Line]) -> None:
    with np.errstate(all="ignore"):
        while warp.at < len(lines):
            line = lines[warp.at]
            warp.at += 1
            try:
                line.act(warp)
            except (Refused, WrongAccess) as error:
                error.add_note(f"in warp {warp.number} of {warp.block.index}: {line.instruction}")
                raise
            if warp.waits:
                return
    warp.done = True
