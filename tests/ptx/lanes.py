"""Instructions that the lanes of a warp execute together."""

from collections.abc import Callable

import numpy as np

from ptx.operands import Context, Step
from ptx.refusal import Refused, require
from ptx.state import LANES, Warp

LANE = np.arange(LANES)


def elect(context: Context) -> Step:
    """Chooses the first lane."""
    context.only("sync")
    number, holds = context.operands[0].split("|")
    put, choose = context.write_bits(number), context.write_bits(holds)

    def step(warp: Warp, mask: np.ndarray) -> None:
        first = int(np.argmax(mask))
        put(warp, np.full(LANES, first, np.uint32), mask)
        choose(warp, LANE == first, mask)

    return step


def shuffle(context: Context) -> Step:
    """Takes the register of another lane of the same segment, or keeps its own."""
    mode = context.parts[2]
    context.only("sync", mode, "b32")
    target, *inside = context.operands[0].split("|")
    put, say = context.write_bits(target), context.write_bits(inside[0]) if inside else None
    read = context.bits(context.operands[1], 32)
    by, limits = (context.bits(operand, 32) for operand in context.operands[2:4])

    def step(warp: Warp, mask: np.ndarray) -> None:
        if not mask.all():
            raise Refused(f"{context.instruction} in some lanes of a warp")
        far, limit = by(warp).astype(np.int64) & 31, limits(warp).astype(np.int64)
        segment, clamp = limit >> 8 & 31, limit & 31
        last, first = LANE & segment | clamp & ~segment, LANE & segment
        lane, holds = {
            "up": lambda: (LANE - far, LANE - far >= last),
            "down": lambda: (LANE + far, LANE + far <= last),
            "bfly": lambda: (LANE ^ far, (LANE ^ far) <= last),
            "idx": lambda: (first | far & ~segment, (first | far & ~segment) <= last),
        }[mode]()
        put(warp, read(warp)[np.where(holds, lane, LANE)], mask)
        if say:
            say(warp, holds, mask)

    return step


def vote(context: Context) -> Step:
    mode = context.parts[2]
    require(mode in ("all", "any", "uni", "ballot"), f"{context.instruction}")
    put, read = context.write_bits(context.operands[0]), context.bits(context.operands[1], 1)

    def step(warp: Warp, mask: np.ndarray) -> None:
        held = read(warp)[mask]
        found = {
            "all": held.all(),
            "any": held.any(),
            "uni": held.all() or not held.any(),
            "ballot": int((1 << LANE.astype(np.uint64)[mask][held]).sum()),
        }[mode]
        put(warp, np.full(LANES, found), mask)

    return step


INSTRUCTIONS: dict[str, Callable[[Context], Step]] = {
    "elect": elect,
    "shfl": shuffle,
    "vote": vote,
}
