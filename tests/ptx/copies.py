"""Bulk copies between global and shared memory. They are done only when a thread waits for them;
until then there is NaN where they write."""

import re
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from ptx.host import Descriptor
from ptx.memory import PARAMETERS, POISON
from ptx.operands import ADDRESS, Context, Step, listed
from ptx.refusal import WrongAccess, require
from ptx.state import Block, Warp
from ptx.types import type_of
from ptx.waiting import first

SWIZZLED_BITS = {16: 0, 32: 1, 64: 2, 128: 3}
"""By the bytes of a swizzle, how many bits of a shared memory address it changes, from bit 4 on."""
S32 = type_of("s32")
COMPLETE = "mbarrier::complete_tx::bytes"


class Box(NamedTuple):
    """The part of an array that a copy of a tensor takes. The last axis is the innermost one."""

    address: int
    of: Descriptor

    def places(self, begins: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """The addresses of the bytes of a box, in order, and whether they are within the array."""
        box = self.of.box
        which = np.indices(box).reshape(len(box), -1) + np.array(begins)[:, None]
        sizes, strides = np.array(self.of.sizes)[:, None], np.array(self.of.strides)[:, None]
        inside = ((which >= 0) & (which < sizes)).all(axis=0)
        size = self.of.bits // 8
        number = self.address + (which * strides).sum(axis=0) * size
        return (number[:, None] + np.arange(size)).ravel(), np.repeat(inside, size)

    def swizzled(self, address: int) -> np.ndarray:
        """The addresses in shared memory of the bytes of a box."""
        places = address + np.arange(np.prod(self.of.box) * self.of.bits // 8)
        mask = (1 << SWIZZLED_BITS[self.of.swizzle]) - 1
        return places ^ ((places >> 7 & mask) << 4)


def bulk(context: Context) -> Step:
    parts = context.parts
    require(parts[:3] == ["cp", "async", "bulk"], f"{context.instruction}")
    if parts[3] in ("commit_group", "wait_group"):
        return commit(context) if parts[3] == "commit_group" else wait(context)
    require("multicast::cluster" not in parts, f"{context.instruction}")
    rank = next((part for part in parts if re.fullmatch(r"\dd", part)), None)
    known = "async", "bulk", "tensor", "global", "shared::cluster", "shared::cta", COMPLETE
    context.only(*known, "bulk_group", *([rank] if rank else []), "tile")
    if rank:
        return load_box(context) if COMPLETE in parts else store_box(context)
    return load_bytes(context) if COMPLETE in parts else store_bytes(context)


def begin(copy: Callable[[], None], warp: Warp) -> None:
    warp.begun.append(copy)


def descriptor_of(context: Context, operand: str) -> Callable:
    """Reads an operand `[descriptor, {x, y}]`, in which the innermost coordinate comes first."""
    found = ADDRESS.fullmatch(operand)
    assert found, operand
    which = context.address(operand)
    coordinates = [context.numbers(one, S32) for one in listed(found[2])]

    def read(warp: Warp, mask: np.ndarray) -> tuple[Box, tuple[int, ...]]:
        place = first(which(warp), mask) - PARAMETERS
        descriptor = warp.block.descriptors.get(place)
        if descriptor is None:
            raise WrongAccess(f"there is no descriptor at {place} of the parameters")
        return descriptor, tuple(first(one(warp), mask) for one in reversed(coordinates))

    return read


def load_box(context: Context) -> Step:
    to, source, barrier = map(context.operands.__getitem__, range(3))
    target, tells = context.address(to), context.address(barrier)
    read = descriptor_of(context, source)

    def step(warp: Warp, mask: np.ndarray) -> None:
        descriptor, begins = read(warp, mask)
        block, place = warp.block.meant(first(target(warp), mask))
        where, (sources, inside) = descriptor.swizzled(place), descriptor.places(begins)
        sources = np.where(inside, sources, descriptor.address).astype(np.uint64)
        load = lambda: np.where(inside, warp.block.memory.load(sources, 1)[:, 0], 0)
        arrives_later(warp.block, block, where, load, first(tells(warp), mask))

    return step


def load_bytes(context: Context) -> Step:
    target, source = (context.address(operand) for operand in context.operands[:2])
    size, tells = context.bits(context.operands[2], 32), context.address(context.operands[3])

    def step(warp: Warp, mask: np.ndarray) -> None:
        block, place = warp.block.meant(first(target(warp), mask))
        count = first(size(warp), mask)
        begins = first(source(warp), mask)
        require(not (begins | place | count) % 16, f"{context.instruction}: not a multiple of 16")
        sources = np.uint64(begins) + np.arange(count, dtype=np.uint64)
        load = lambda: warp.block.memory.load(sources, 1)[:, 0]
        arrives_later(warp.block, block, place + np.arange(count), load, first(tells(warp), mask))

    return step


def arrives_later(own: Block, block: Block, where, load: Callable, barrier_at: int) -> None:
    memory = block.shared.bytes
    if where.min() < 0 or where.max() >= memory.size:
        raise WrongAccess(f"a copy to {where.min()} .. {where.max()} of {block.shared.name}")
    memory[where] = POISON
    barrier = own.barrier(barrier_at)

    def copy() -> None:
        memory[where] = load()
        barrier.bytes -= where.size
        barrier.settle()

    barrier.copies.append(copy)


def store_box(context: Context) -> Step:
    read, source = descriptor_of(context, context.operands[0]), context.address(context.operands[1])

    def step(warp: Warp, mask: np.ndarray) -> None:
        descriptor, begins = read(warp, mask)
        block, place = warp.block.meant(first(source(warp), mask))
        where, (targets, inside) = descriptor.swizzled(place), descriptor.places(begins)

        def copy() -> None:
            held = block.shared.bytes[where][inside]
            block.memory.store(targets[inside].astype(np.uint64), held[:, None])

        begin(copy, warp)

    return step


def store_bytes(context: Context) -> Step:
    target, source = (context.address(operand) for operand in context.operands[:2])
    size = context.bits(context.operands[2], 32)

    def step(warp: Warp, mask: np.ndarray) -> None:
        for lane in np.flatnonzero(mask):
            block, place = warp.block.meant(int(source(warp)[lane]))
            count = int(size(warp)[lane])
            targets = target(warp)[lane] + np.arange(count, dtype=np.uint64)
            held = block.shared.bytes[place : place + count]
            begin(partial(store_held, block, targets, held), warp)

    return step


def store_held(block: Block, targets: np.ndarray, held: np.ndarray) -> None:
    block.memory.store(targets, held[:, None])


def commit(context: Context) -> Step:
    def step(warp: Warp, mask: np.ndarray) -> None:
        warp.groups.append(warp.begun)
        warp.begun = []

    return step


def wait(context: Context) -> Step:
    """Waits until at most so many groups of copies are under way."""
    context.only("async", "bulk", "wait_group", "read")
    left = int(context.operands[0])

    def step(warp: Warp, mask: np.ndarray) -> None:
        while len(warp.groups) > left:
            for copy in warp.groups.pop(0):
                copy()

    return step


INSTRUCTIONS: dict[str, Callable[[Context], Step]] = {"cp": bulk}
