"""Types of PTX: how the bits in a register are read as numbers, and numbers rounded to bits."""

from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np

from ptx.refusal import Refused

UNSIGNED = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
"""The numpy type of a register, by its width in bits."""
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
FLOATS = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "f32": np.float32,
    "f64": np.float64,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}
BITS_OF_FLOATS = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64, "e4m3": 8, "e5m2": 8}
SMALLEST_NORMAL = np.float32(2.0**-126)


class Type(NamedTuple):
    name: str
    bits: int
    """The width of all numbers together, if there are several in a register."""
    dtype: type
    """The numpy type of one number in memory."""
    kind: str
    """unsigned, signed, float or bits."""

    @property
    def numbers(self) -> int:
        return self.bits // (8 * np.dtype(self.dtype).itemsize) if self.name != "pred" else 1


def type_of(name: str) -> Type:
    if name == "pred":
        return Type(name, 1, np.bool_, "bits")
    if name.endswith("x2"):
        one = type_of(name.removesuffix("x2"))
        return one._replace(name=name, bits=2 * one.bits)
    if name in FLOATS:
        return Type(name, BITS_OF_FLOATS[name], FLOATS[name], "float")
    kind, bits = name[0], int(name[1:]) if name[1:].isdigit() else 0
    if kind in "bus" and bits in SIGNED:
        dtype = SIGNED[bits] if kind == "s" else UNSIGNED[bits]
        kinds = {"s": "signed", "u": "unsigned", "b": "bits"}
        return Type(name, bits, dtype, kinds[kind])
    raise Refused(f"the type {name}")


def numbers_of(bits: np.ndarray, kind: Type) -> np.ndarray:
    """The bits of all lanes as numbers, with one column for each of several numbers in a register.
    Floats of 16 bits are widened to float32, which is exact."""
    if kind.kind != "float":
        return bits if kind.name == "pred" else bits.view(kind.dtype)
    numbers = np.ascontiguousarray(bits).view(kind.dtype)
    if kind.numbers > 1:
        numbers = numbers.reshape(*bits.shape, kind.numbers)
    return numbers if kind.bits // kind.numbers >= 32 else numbers.astype(np.float32)


def bits_of(numbers: np.ndarray, kind: Type) -> np.ndarray:
    """Numbers as bits, rounded to the nearest; of two nearest, to the even one."""
    if kind.name == "pred":
        return np.asarray(numbers, np.bool_)
    unsigned = UNSIGNED[kind.bits]
    if kind.kind != "float":
        return np.asarray(numbers).astype(kind.dtype).view(unsigned)
    rounded = np.ascontiguousarray(np.asarray(numbers).astype(kind.dtype))
    return rounded.view(unsigned).reshape(rounded.shape[:1])


def flushed(numbers: np.ndarray) -> np.ndarray:
    """Zeros of the same sign in place of numbers smaller than normal ones (`.ftz`)."""
    small = np.abs(numbers) < SMALLEST_NORMAL
    return np.where(small, np.copysign(np.zeros_like(numbers), numbers), numbers)


def toward(exact: np.ndarray, rounding: str) -> np.ndarray:
    """Numbers in float64 rounded to float32: rn, rz, rm or rp."""
    nearest = exact.astype(np.float32)
    if rounding == "rn":
        return nearest
    lower = np.where(nearest > exact, np.nextafter(nearest, np.float32(-np.inf)), nearest)
    upper = np.where(nearest < exact, np.nextafter(nearest, np.float32(np.inf)), nearest)
    chosen: dict[str, Callable[[], np.ndarray]] = {
        "rm": lambda: lower,
        "rp": lambda: upper,
        "rz": lambda: np.where(exact < 0, upper, lower),
    }
    return chosen[rounding]()
