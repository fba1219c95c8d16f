"""Matrix instructions of a warp: `mma.sync`, and the loads and stores of its operands.

In eight rows of four registers of 32 bits, lane l has register l % 4 of row l // 4. `ldmatrix` and
`stmatrix` distribute eight rows of 16 bytes in this way, and the parts of a result and of both
inputs have the same layout: each lane has a pair of neighbouring columns, of 16 bits each, or of
float32 in a result.
"""

from collections.abc import Callable

import numpy as np

from ptx.moving import by_block
from ptx.operands import Context, Step, listed
from ptx.refusal import Refused, require
from ptx.state import LANES, Warp
from ptx.types import Type, numbers_of, type_of

ROWS, QUAD, ROW_BYTES = 8, 4, 16
MATRICES = {"x1": 1, "x2": 2, "x4": 4}


def whole(context: Context, mask: np.ndarray) -> None:
    if not mask.all():
        raise Refused(f"{context.instruction} in some lanes of a warp")


def matrices_of(context: Context) -> int:
    context.only("sync", "aligned", "m8n8", *MATRICES, "trans", "shared", "shared::cta", "b16")
    return next(MATRICES[part] for part in context.parts if part in MATRICES)


def ldmatrix(context: Context) -> Step:
    """Loads matrices. Lanes 8 i to 8 i + 7 have the addresses of the rows of matrix i."""
    count = matrices_of(context)
    put = [context.write_bits(one) for one in listed(context.operands[0])]
    address, transposed = context.address(context.operands[1]), "trans" in context.parts

    def step(warp: Warp, mask: np.ndarray) -> None:
        whole(context, mask)
        where = address(warp)[: ROWS * count]
        rows = by_block(warp, where, lambda memory, which: memory.load(which, ROW_BYTES))
        for one, matrix in zip(put, rows.reshape(count, ROWS, ROW_BYTES)):
            numbers = matrix.view(np.uint16)
            numbers = np.ascontiguousarray(numbers.T) if transposed else numbers
            one(warp, numbers.view(np.uint32).reshape(LANES), mask)

    return step


def stmatrix(context: Context) -> Step:
    count = matrices_of(context)
    read = [context.bits(one, 32) for one in listed(context.operands[1])]
    address, transposed = context.address(context.operands[0]), "trans" in context.parts

    def step(warp: Warp, mask: np.ndarray) -> None:
        whole(context, mask)
        numbers = np.stack([one(warp) for one in read]).view(np.uint16).reshape(count, ROWS, ROWS)
        numbers = np.ascontiguousarray(numbers.mT if transposed else numbers)
        rows = numbers.view(np.uint8).reshape(-1, ROW_BYTES)
        where = address(warp)[: ROWS * count]
        by_block(warp, where, lambda memory, which: memory.store(which, rows))

    return step


def left_side(registers: list[np.ndarray], kind: Type) -> np.ndarray:
    """16 rows, from registers with the upper and the lower eight rows of the first half of the
    inputs, and then of the second half."""
    quarters = [part_of(one, kind) for one in registers]
    return np.block([[quarters[0], quarters[2]], [quarters[1], quarters[3]]])


def right_side(registers: list[np.ndarray], kind: Type) -> np.ndarray:
    """Eight columns, each in the lanes that have a row of the left side: first the first half of
    the inputs, then the second half."""
    return np.concatenate([part_of(one, kind).T for one in registers])


def part_of(register: np.ndarray, kind: Type) -> np.ndarray:
    """Eight rows, each from the registers of four lanes, in float64."""
    pair = Type(f"{kind.name}s", 32, kind.dtype, "float")
    return numbers_of(register, pair).reshape(ROWS, -1).astype(np.float64)


def result(registers: list[np.ndarray]) -> np.ndarray:
    pairs = np.stack([one.view(np.float32) for one in registers], axis=-1)
    upper, lower = pairs[:, :2].reshape(ROWS, ROWS), pairs[:, 2:].reshape(ROWS, ROWS)
    return np.concatenate([upper, lower]).astype(np.float64)


def mma(context: Context) -> Step:
    shape = context.parts[3]
    to, left, right, added = (type_of(part) for part in context.parts[-4:])
    require(
        context.parts[:3] == ["mma", "sync", "aligned"]
        and context.parts[4:6] == ["row", "col"]
        and (to.name, added.name) == ("f32", "f32")
        and shape == f"m16n8k{256 // left.bits}"
        and left.name in ("bf16", "f16", "e4m3", "e5m2"),
        f"{context.instruction}",
    )
    put = [context.write_bits(one) for one in listed(context.operands[0])]
    a, b, c = ([context.bits(one, 32) for one in listed(part)] for part in context.operands[1:])

    def step(warp: Warp, mask: np.ndarray) -> None:
        whole(context, mask)
        held = lambda registers: [one(warp) for one in registers]
        sums = result(held(c)) + left_side(held(a), left) @ right_side(held(b), right)
        halves = sums.astype(np.float32).reshape(2, LANES, 2)
        for i, one in enumerate(put):
            one(warp, np.ascontiguousarray(halves[i // 2, :, i % 2]).view(np.uint32), mask)

    return step


INSTRUCTIONS: dict[str, Callable[[Context], Step]] = {
    "mma": mma,
    "ldmatrix": ldmatrix,
    "stmatrix": stmatrix,
}
