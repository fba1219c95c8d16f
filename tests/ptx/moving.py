"""Instructions that move numbers: between registers, and between registers and memory."""

from collections.abc import Callable

import numpy as np

from ptx.memory import PARAMETERS
from ptx.operands import Context, Step, listed
from ptx.refusal import Refused, require
from ptx.state import LANES, Warp
from ptx.types import UNSIGNED, Type, numbers_of, type_of

SPACES = ("global", "shared", "param", "")
ORDERS = ("relaxed", "acquire", "release", "volatile", "weak", "gpu", "cta", "cluster", "sys")
HINTS = ("nc", "L1::no_allocate", "L2::128B", "L2::256B", "L1::evict_last", "L1::evict_first")
COUNTS = {"v2": 2, "v4": 4, "v8": 8}


def mov(context: Context) -> Step:
    """Moves a register, joins several into one that is as wide as all of them, or splits one."""
    kind = type_of(context.parts[-1])
    context.only(kind.name)
    to, source = map(listed, context.operands)
    put = [context.write_bits(one) for one in to]
    part = kind.bits // max(len(to), len(source))
    read = [context.bits(one, kind.bits // len(source)) for one in source]
    if len(to) == len(source):
        return lambda warp, mask: put[0](warp, read[0](warp), mask)

    def step(warp: Warp, mask: np.ndarray) -> None:
        parts = np.stack([one(warp) for one in read], axis=-1)
        found = parts.view(UNSIGNED[part if len(to) > 1 else kind.bits])
        for i, one in enumerate(put):
            one(warp, found[:, i], mask)

    return step


def cvta(context: Context) -> Step:
    """Converts an address, which stays the same in all spaces. Shared memory is refused."""
    require(context.parts[-1] in ("u64", "u32"), f"{context.instruction}")
    require("shared" not in context.parts[1:], f"{context.instruction}")
    put, read = context.write_bits(context.operands[0]), context.bits(context.operands[1], 64)
    return lambda warp, mask: put(warp, read(warp), mask)


def space_of(context: Context) -> str:
    found = [part.split("::")[0] for part in context.parts[1:]]
    return next((part for part in found if part in SPACES), "")


def known(context: Context, kind: Type) -> None:
    context.only(
        "param::entry", "shared::cta", "shared::cluster", "b128",
        *SPACES, *ORDERS, *HINTS, *COUNTS, kind.name,
    )  # fmt: skip


def load_bytes(warp: Warp, space: str, addresses: np.ndarray, size: int) -> np.ndarray:
    if space == "shared":
        return by_block(warp, addresses, lambda memory, which: memory.load(which, size))
    if space == "param" or int(addresses[0]) >= PARAMETERS:
        return warp.block.parameters.load(addresses, size)
    return warp.block.memory.load(addresses, size)


def by_block(warp: Warp, addresses: np.ndarray, act: Callable) -> np.ndarray:
    """Acts on the shared memory of one thread block, which must be the same for all lanes."""
    block, place = warp.block.meant(addresses[0])
    base = np.uint64(int(addresses[0]) - place)
    if ((addresses - base) >> np.uint64(24)).any():
        raise Refused("lanes that mean the shared memory of different thread blocks")
    return act(block.shared, addresses - base)


def load(context: Context) -> Step:
    kind, space = type_of(context.parts[-1]), space_of(context)
    known(context, kind)
    count = next((COUNTS[part] for part in context.parts if part in COUNTS), 1)
    write = [context.write(one, kind) for one in listed(context.operands[0])]
    require(len(write) == count, f"{context.instruction}")
    address, size = context.address(context.operands[1]), kind.bits // 8

    def step(warp: Warp, mask: np.ndarray) -> None:
        rows = load_bytes(warp, space, address(warp)[mask], size * count)
        wide = np.zeros((LANES, size * count), np.uint8)
        wide[mask] = rows
        found = wide.view(UNSIGNED[kind.bits])
        for i, one in enumerate(write):
            one(warp, numbers_of(np.ascontiguousarray(found[:, i]), kind), mask)

    return step


def store(context: Context) -> Step:
    kind, space = type_of(context.parts[-1]), space_of(context)
    known(context, kind)
    require(space != "param", f"{context.instruction}")
    read = [context.bits(one, kind.bits) for one in listed(context.operands[1])]
    address = context.address(context.operands[0])

    def step(warp: Warp, mask: np.ndarray) -> None:
        rows = np.stack([one(warp) for one in read], axis=-1).view(np.uint8)[mask]
        addresses = address(warp)[mask]
        if space == "shared":
            by_block(warp, addresses, lambda memory, which: memory.store(which, rows))
        else:
            warp.block.memory.store(addresses, rows)

    return step


INSTRUCTIONS: dict[str, Callable[[Context], Step]] = {
    "mov": mov,
    "cvta": cvta,
    "ld": load,
    "st": store,
}
