"""Instructions that compute numbers, each lane for itself."""

import operator
from collections.abc import Callable

import numpy as np

from ptx.operands import Context, Step
from ptx.refusal import Refused, require
from ptx.state import Warp
from ptx.types import Type, flushed, toward, type_of

Function = Callable[..., np.ndarray]
ROUNDINGS = ("rn", "rz", "rm", "rp")


def wide_enough(kind: Type) -> type:
    """The type in which a sum or product is computed before it is rounded once."""
    return np.float64 if kind.kind == "float" else kind.dtype


def rounded(numbers: np.ndarray, kind: Type, parts: list[str]) -> np.ndarray:
    if kind.kind != "float":
        return numbers
    if kind.name == "f32":
        rounding = next((part for part in parts if part in ROUNDINGS), "rn")
        numbers = toward(np.asarray(numbers, np.float64), rounding)
    if "ftz" in parts:
        numbers = flushed(numbers)
    if "sat" in parts:
        numbers = np.clip(np.where(np.isnan(numbers), 0, numbers), 0, 1)
    return numbers


def of_numbers(function: Function, *known: str) -> Callable[[Context], Step]:
    """An instruction whose last part is the type of all its operands."""

    def build(context: Context) -> Step:
        kind, parts = type_of(context.parts[-1]), context.parts
        context.only(kind.name, "ftz", *known, *(ROUNDINGS if kind.kind == "float" else ()))
        write = context.write(context.operands[0], kind)
        read = [context.numbers(operand, kind) for operand in context.operands[1:]]
        wide = wide_enough(kind)
        flush = flushed if "ftz" in parts else lambda numbers: numbers

        def step(warp: Warp, mask: np.ndarray) -> None:
            given = [flush(one(warp)).astype(wide, copy=False) for one in read]
            write(warp, rounded(function(*given), kind, parts), mask)

        return step

    return build


def product(context: Context) -> Step:
    """mul and mad. Those of integers give the lower half, the upper half, or all of the bits."""
    kind = type_of(context.parts[-1])
    if kind.kind == "float":
        return of_numbers(operator.mul, "sat")(context)
    context.only("lo", "hi", "wide", kind.name)
    bits = 2 * kind.bits if "wide" in context.parts else kind.bits
    to = type_of(f"{kind.name[0]}{bits}")
    write, (a, b) = context.write(context.operands[0], to), context.operands[1:3]
    read = context.numbers(a, kind), context.numbers(b, kind)
    added = context.numbers(context.operands[3], to) if len(context.operands) == 4 else None
    high = "hi" in context.parts
    require(not high or kind.bits == 32, f"{context.instruction}")
    wide = np.dtype(f"{'i' if kind.kind == 'signed' else 'u'}8")

    def step(warp: Warp, mask: np.ndarray) -> None:
        x, y = (one(warp).astype(wide) for one in read)
        found = x * y >> np.array(32, wide) if high else x * y
        if added is not None:
            found = found + added(warp).astype(wide)
        write(warp, found, mask)

    return step


def bitwise(function: Function) -> Callable[[Context], Step]:
    def build(context: Context) -> Step:
        kind = type_of(context.parts[-1])
        context.only(kind.name)
        put = context.write_bits(context.operands[0])
        read = [context.bits(operand, kind.bits) for operand in context.operands[1:]]
        return lambda warp, mask: put(warp, function(*(one(warp) for one in read)), mask)

    return build


def shift(left: bool) -> Callable[[Context], Step]:
    """A shift. If it is by the width or more, it leaves zeros, or only copies of the sign."""

    def build(context: Context) -> Step:
        kind = type_of(context.parts[-1])
        context.only(kind.name)
        write = context.write(context.operands[0], kind)
        number, by = context.numbers(context.operands[1], kind), context.operands[2]
        amount = context.bits(by, 32)

        def step(warp: Warp, mask: np.ndarray) -> None:
            far, x = amount(warp).astype(np.uint64), number(warp)
            last = np.minimum(far, kind.bits - 1).astype(kind.dtype)
            found = x << last if left else x >> last
            gone = np.zeros_like(x) if left or kind.kind != "signed" else found
            write(warp, np.where(far >= kind.bits, gone, found), mask)

        return step

    return build


COMPARED = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "lo": operator.lt,
    "ls": operator.le,
    "hi": operator.gt,
    "hs": operator.ge,
}
JOINED = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def compared(name: str) -> Function:
    """The comparison of this name. With `u` at its end, it is also true if an operand is NaN."""
    if name in ("num", "nan"):
        unordered = lambda a, b: np.isnan(a) | np.isnan(b)
        return unordered if name == "nan" else lambda a, b: ~unordered(a, b)
    also = name not in COMPARED
    function = COMPARED[name.removesuffix("u") if also else name]

    def compare(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        if a.dtype.kind != "f":
            return function(a, b)
        unordered = np.isnan(a) | np.isnan(b)
        return function(a, b) | unordered if also else function(a, b) & ~unordered

    return compare


def setp(context: Context) -> Step:
    _, name, *joined, last = context.parts
    joined = [part for part in joined if part != "ftz"]
    require(len(joined) <= 1 and set(joined) <= set(JOINED), f"{context.instruction}")
    kind, compare = type_of(last), compared(name)
    holds, *fails = context.operands[0].split("|")
    require(not fails, f"{context.instruction}")
    write = context.write_bits(holds)
    a, b = (context.numbers(operand, kind) for operand in context.operands[1:3])
    other = context.bits(context.operands[3], 1) if joined else None

    def step(warp: Warp, mask: np.ndarray) -> None:
        found = compare(a(warp), b(warp))
        write(warp, JOINED[joined[0]](found, other(warp)) if other else found, mask)

    return step


def selp(context: Context) -> Step:
    kind = type_of(context.parts[-1])
    context.only(kind.name)
    put = context.write_bits(context.operands[0])
    a, b = (context.bits(operand, kind.bits) for operand in context.operands[1:3])
    chosen = context.bits(context.operands[3], 1)
    return lambda warp, mask: put(warp, np.where(chosen(warp), a(warp), b(warp)), mask)


def extreme(ordinary: Function, of_nan: Function) -> Callable[[Context], Step]:
    """min and max. With the modifier `NaN`, NaN is the result if an operand is NaN; without it, the
    other operand is."""

    def build(context: Context) -> Step:
        function = of_nan if "NaN" in context.parts else ordinary
        return of_numbers(function, "NaN")(context)

    return build


def bfe(context: Context) -> Step:
    """Some bits of a number, given the first one and their count."""
    kind = type_of(context.parts[-1])
    require(kind.kind == "unsigned" or kind.kind == "bits", f"{context.instruction}")
    put = context.write_bits(context.operands[0])
    read = context.bits(context.operands[1], kind.bits)
    first, count = (context.bits(operand, 32) for operand in context.operands[2:])

    def step(warp: Warp, mask: np.ndarray) -> None:
        begin, length = first(warp) & 0xFF, np.minimum(count(warp) & 0xFF, 63).astype(np.uint64)
        upper = read(warp).astype(np.uint64) >> np.minimum(begin, 63).astype(np.uint64)
        put(warp, upper & ((np.uint64(1) << length) - np.uint64(1)), mask)

    return step


def lop3(context: Context) -> Step:
    """Any function of three bits, given by its table of eight results."""
    context.only("b32")
    put = context.write_bits(context.operands[0])
    read = [context.bits(operand, 32) for operand in context.operands[1:4]]
    table = int(context.operands[4], 0)

    def step(warp: Warp, mask: np.ndarray) -> None:
        a, b, c = (one(warp) for one in read)
        found = np.zeros_like(a)
        for entry in range(8):
            if table >> entry & 1:
                chosen = [x if entry & bit else ~x for x, bit in ((a, 4), (b, 2), (c, 1))]
                found |= chosen[0] & chosen[1] & chosen[2]
        put(warp, found, mask)

    return step


def prmt(context: Context) -> Step:
    """Bytes of two registers, in the order of a selector's digits. If a digit is 8 or more, the
    sign of the byte is repeated."""
    context.only("b32")
    put = context.write_bits(context.operands[0])
    a, b, selector = (context.bits(operand, 32) for operand in context.operands[1:])

    def step(warp: Warp, mask: np.ndarray) -> None:
        both = np.stack([a(warp), b(warp)], axis=-1).view(np.uint8)
        digits = (selector(warp)[:, None] >> np.arange(0, 16, 4, dtype=np.uint32)) & 15
        found = np.take_along_axis(both, (digits & 7).astype(np.int64), axis=-1)
        signs = np.where(found >> 7, 255, 0).astype(np.uint8)
        put(warp, np.where(digits & 8, signs, found).view(np.uint32)[:, 0], mask)

    return step


def funnel(context: Context) -> Step:
    """Shifts two registers as one, and takes the upper (left) or the lower one (right)."""
    context.only("l", "r", "wrap", "clamp", "b32")
    put = context.write_bits(context.operands[0])
    low, high, by = (context.bits(operand, 32) for operand in context.operands[1:])
    wrap, left = "wrap" in context.parts, "l" in context.parts

    def step(warp: Warp, mask: np.ndarray) -> None:
        both = high(warp).astype(np.uint64) << np.uint64(32) | low(warp)
        far = (by(warp) & 31 if wrap else np.minimum(by(warp), 32)).astype(np.uint64)
        put(warp, both << far >> np.uint64(32) if left else both >> far, mask)

    return step


def quotient(context: Context) -> Step:
    """Division. That of integers is rounded toward zero."""
    kind = type_of(context.parts[-1])
    if kind.kind == "float":
        return of_numbers(operator.truediv, "full", "approx")(context)
    return of_numbers(divided)(context)


def divided(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if not b.all():
        raise Refused("a division by zero")
    whole = np.abs(a) // np.abs(b)
    return np.where((a < 0) != (b < 0), -whole, whole) if a.dtype.kind == "i" else a // b


def remainder(context: Context) -> Step:
    return of_numbers(lambda a, b: a - divided(a, b) * b)(context)


UNARY = {
    "abs": np.abs,
    "neg": np.negative,
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": lambda x: 1 / x,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sqrt": np.sqrt,
    "tanh": np.tanh,
}
INSTRUCTIONS: dict[str, Callable[[Context], Step]] = {
    **{name: of_numbers(function, "approx") for name, function in UNARY.items()},
    "add": of_numbers(operator.add, "sat"),
    "sub": of_numbers(operator.sub, "sat"),
    "fma": of_numbers(lambda a, b, c: a * b + c, "sat"),
    "min": extreme(np.fmin, np.minimum),
    "max": extreme(np.fmax, np.maximum),
    "mul": product,
    "mad": product,
    "and": bitwise(operator.and_),
    "or": bitwise(operator.or_),
    "xor": bitwise(operator.xor),
    "not": bitwise(np.invert),
    "shl": shift(left=True),
    "shr": shift(left=False),
    "setp": setp,
    "selp": selp,
    "bfe": bfe,
    "lop3": lop3,
    "prmt": prmt,
    "shf": funnel,
    "div": quotient,
    "rem": remainder,
}
