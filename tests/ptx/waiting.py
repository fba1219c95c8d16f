"""Barriers and fences. Memory is always in order here, so fences do nothing."""

from collections.abc import Callable

import numpy as np

from ptx.operands import Context, Step
from ptx.refusal import Refused, require
from ptx.state import LANES, Barrier, Warp

FENCES = ("fence", "membar", "griddepcontrol", "prefetch", "nanosleep", "setmaxnreg")
"""Instructions that change no number."""


def nothing(context: Context) -> Step:
    return lambda warp, mask: None


def bar(context: Context) -> Step:
    """A barrier of some warps of a thread block, or of all."""
    parts = context.parts
    if parts[1] == "warp":
        return nothing(context)
    context.only("sync", "arrive", "aligned", "cta")
    which = context.bits(context.operands[0], 32)
    among = context.bits(context.operands[1], 32) if len(context.operands) > 1 else None

    def step(warp: Warp, mask: np.ndarray) -> None:
        block, number = warp.block, int(which(warp)[0])
        threads = int(among(warp)[0]) if among else block.threads
        arrived, passed = block.arrived, block.passed
        now = passed.setdefault(number, 0)
        arrived[number] = arrived.get(number, 0) + 1
        if arrived[number] == threads // LANES:
            arrived[number], passed[number] = 0, now + 1
        elif "sync" in parts:
            warp.waits = lambda: passed[number] > now

    return step


def first(bits: np.ndarray, mask: np.ndarray) -> int:
    return int(bits[np.argmax(mask)])


def mbarrier(context: Context) -> Step:
    action = context.parts[1]
    if action not in MBARRIER:
        raise Refused(f"{context.instruction}")
    return MBARRIER[action](context)


def init(context: Context) -> Step:
    context.only("init", "shared", "shared::cta", "b64")
    address, count = context.address(context.operands[0]), context.bits(context.operands[1], 32)

    def step(warp: Warp, mask: np.ndarray) -> None:
        block, place = warp.block.meant(first(address(warp), mask))
        expected = first(count(warp), mask)
        block.barriers[place] = Barrier(expected, expected)

    return step


def arrive(context: Context) -> Step:
    context.only(
        "arrive", "expect_tx", "release", "relaxed", "cta", "cluster",
        "shared", "shared::cta", "shared::cluster", "b64",
    )  # fmt: skip
    operands = [one for one in context.operands if one.startswith("[")]
    address = context.address(operands[0])
    rest = context.operands[context.operands.index(operands[0]) + 1 :]
    number = context.bits(rest[0], 32) if rest else None
    brings = "expect_tx" in context.parts

    def step(warp: Warp, mask: np.ndarray) -> None:
        for lane in np.flatnonzero(mask):
            barrier = warp.block.barrier(int(address(warp)[lane]))
            given = int(number(warp)[lane]) if number else 0
            barrier.bytes += given if brings else 0
            barrier.missing -= given if number and not brings else 1
            barrier.settle()

    return step


def expect(context: Context) -> Step:
    context.only("expect_tx", "relaxed", "cta", "cluster", "shared", "shared::cta", "b64")
    address, number = context.address(context.operands[0]), context.bits(context.operands[1], 32)

    def step(warp: Warp, mask: np.ndarray) -> None:
        for lane in np.flatnonzero(mask):
            warp.block.barrier(int(address(warp)[lane])).bytes += int(number(warp)[lane])

    return step


def try_wait(context: Context) -> Step:
    """Waits for the end of the phase with this parity. Copies that report to the barrier are done
    only now, so that their data cannot be read too early."""
    context.only(
        "try_wait", "parity", "shared", "shared::cta", "acquire", "relaxed", "cta", "cluster", "b64"
    )
    require("parity" in context.parts, f"{context.instruction}")
    put, address = context.write_bits(context.operands[0]), context.address(context.operands[1])
    parity = context.bits(context.operands[2], 32)

    def step(warp: Warp, mask: np.ndarray) -> None:
        barrier = warp.block.barrier(first(address(warp), mask))
        wanted = first(parity(warp), mask) & 1

        def over() -> bool:
            if barrier.phase & 1 == wanted:
                copies, barrier.copies = barrier.copies, []
                for copy in copies:
                    copy()
            return barrier.phase & 1 != wanted

        put(warp, np.ones(LANES, bool), mask)
        if not over():
            warp.waits = over

    return step


MBARRIER: dict[str, Callable[[Context], Step]] = {
    "init": init,
    "arrive": arrive,
    "expect_tx": expect,
    "try_wait": try_wait,
}
INSTRUCTIONS: dict[str, Callable[[Context], Step]] = {
    **dict.fromkeys(FENCES, nothing),
    "bar": bar,
    "barrier": bar,
    "mbarrier": mbarrier,
}
