"""Conversions between types of numbers (`cvt`)."""

from collections.abc import Callable

import ml_dtypes
import numpy as np

from ptx.arithmetic import ROUNDINGS, rounded
from ptx.operands import Context, Step
from ptx.refusal import Refused, require
from ptx.state import Warp
from ptx.types import Type, flushed, type_of


def cvt(context: Context) -> Step:
    *given, to_name, from_name = context.parts
    to, source = type_of(to_name), type_of(from_name)
    known = {*ROUNDINGS, "rni", "rzi", "rmi", "rpi", "sat", "ftz", "satfinite"}
    require(set(given[1:]) <= known, f"{context.instruction}")
    if to.numbers > 1 and to.kind == "float":
        return pack(context, to, source)
    write, read = (
        context.write(context.operands[0], to),
        context.numbers(context.operands[1], source),
    )

    def step(warp: Warp, mask: np.ndarray) -> None:
        write(warp, converted(read(warp), to, source, given), mask)

    return step


def converted(numbers: np.ndarray, to: Type, source: Type, parts: list[str]) -> np.ndarray:
    if to.kind == "float":
        if "ftz" in parts:
            numbers = flushed(numbers)
        numbers = numbers.astype(np.float64)
        if "sat" in parts:
            numbers = np.clip(np.where(np.isnan(numbers), 0, numbers), 0, 1)
        if to.name == "f32" or not set(parts) & {"rz", "rm", "rp"}:
            return rounded(numbers, to, [part for part in parts if part != "sat"])
        raise Refused(f"{'.'.join(parts)} to {to.name}")
    if source.kind == "float":
        whole = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
        rounding = next(part for part in parts if part in whole)
        numbers = whole[rounding](numbers.astype(np.float64))
    if source.kind == "float" or "sat" in parts:
        most = np.iinfo(to.dtype)
        top = float(most.max) if to.bits < 64 else np.nextafter(float(most.max), 0)
        numbers = np.clip(np.where(numbers != numbers, 0, numbers), float(most.min), top)
    return numbers


def pack(context: Context, to: Type, source: Type) -> Step:
    """Two numbers in one register, of which the first named one is in the upper half."""
    context.only("rn", "satfinite", to.name, source.name)
    put = context.write(context.operands[0], to)
    if len(context.operands) == 2:
        one = context.numbers(context.operands[1], source)
        return lambda warp, mask: put(warp, one(warp), mask)
    upper, lower = (context.numbers(operand, source) for operand in context.operands[1:])
    most = float(ml_dtypes.finfo(to.dtype).max) if "satfinite" in context.parts else np.inf

    def step(warp: Warp, mask: np.ndarray) -> None:
        pair = np.stack([lower(warp), upper(warp)], axis=-1)
        put(warp, np.clip(pair, -most, most), mask)

    return step


INSTRUCTIONS: dict[str, Callable[[Context], Step]] = {"cvt": cvt}
