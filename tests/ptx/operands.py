"""Reads and writes the operands of an instruction: registers, numbers and addresses."""

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ptx.memory import PARAMETERS, POISON
from ptx.parse import Instruction, Kernel
from ptx.refusal import Refused, require
from ptx.state import LANES, Warp
from ptx.types import UNSIGNED, Type, bits_of, numbers_of

Bits = Callable[[Warp], np.ndarray]
Step = Callable[[Warp, np.ndarray], None]
"""What an instruction does in the lanes of a mask."""
ADDRESS = re.compile(r"\[\s*([^,\[\]{}]+?)\s*(?:,\s*(.*?))?\s*\]")
NUMBER = re.compile(r"0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|-?0[xX][0-9a-fA-F]+|-?\d+")


class Context(NamedTuple):
    """An instruction of a kernel, with its modifiers still to be looked at."""

    kernel: Kernel
    instruction: Instruction

    @property
    def parts(self) -> list[str]:
        return self.instruction.op.split(".")

    @property
    def operands(self) -> tuple[str, ...]:
        return self.instruction.operands

    def only(self, *known: str) -> None:
        """Refuses modifiers that are not known here and would be ignored."""
        unknown = set(self.parts[1:]) - set(known)
        require(not unknown, f"{', '.join(sorted(unknown))} in {self.instruction}")

    def bits(self, operand: str, width: int) -> Bits:
        return bits_at(self.kernel, operand, width)

    def numbers(self, operand: str, kind: Type) -> Bits:
        bits = self.bits(operand, kind.bits)
        return lambda warp: numbers_of(bits(warp), kind)

    def write(self, operand: str, kind: Type) -> Callable[[Warp, np.ndarray, np.ndarray], None]:
        """Writes numbers into a register, which may be wider."""
        put, signed = self.write_bits(operand), kind.kind == "signed"
        wide = UNSIGNED[self.width(operand)]
        if not signed:
            return lambda warp, numbers, mask: put(warp, bits_of(numbers, kind).astype(wide), mask)
        extended = lambda numbers: np.asarray(numbers).astype(kind.dtype).astype(wide)
        return lambda warp, numbers, mask: put(warp, extended(numbers), mask)

    def width(self, operand: str) -> int:
        found = self.kernel.width(operand)
        require(found, f"writing to {operand} in {self.instruction}")
        return int(found or 0)

    def write_bits(self, operand: str) -> Callable[[Warp, np.ndarray, np.ndarray], None]:
        if operand == "_":
            return lambda warp, bits, mask: None
        dtype = UNSIGNED[self.width(operand)]
        unknown = np.full(LANES, POISON, np.uint8).astype(np.int8).astype(dtype)

        def put(warp: Warp, bits: np.ndarray, mask: np.ndarray) -> None:
            bits = np.broadcast_to(bits, LANES).astype(dtype)
            if not mask.all():
                bits = np.where(mask, bits, warp.registers.get(operand, unknown))
            warp.registers[operand] = bits

        return put

    def address(self, operand: str, width: int = 64) -> Bits:
        """The address in `[register + 12]`, or in the first part of a list."""
        found = ADDRESS.fullmatch(operand)
        require(found, f"the address {operand}")
        assert found
        base, *more = [part for part in re.split(r"\+", found[1]) if part]
        offset = np.uint64(sum(int(part, 0) for part in more) & (2**64 - 1))
        base = base.strip()
        held = self.kernel.width(base) or width
        address = self.bits(base, held)
        return lambda warp: address(warp).astype(np.uint64) + offset


def bits_at(kernel: Kernel, operand: str, width: int) -> Bits:
    """The bits of an operand; only the lower ones if it is wider than `width`."""
    dtype = UNSIGNED[width]
    held = kernel.width(operand)
    if held is not None:
        if held == width:
            return lambda warp: warp.registers[operand]
        require(held > width, f"{width} bits of {operand}")
        return lambda warp: warp.registers[operand].astype(dtype)
    if operand.startswith("%"):
        return lambda warp: warp.special(operand).astype(dtype)
    constant = np.full(LANES, constant_of(kernel, operand) & ((1 << width) - 1), dtype)
    return lambda warp: constant


def constant_of(kernel: Kernel, operand: str) -> int:
    if operand in kernel.shared:
        return kernel.shared[operand]
    if operand in kernel.parameters:
        return PARAMETERS + place_of_parameter(kernel, operand)
    if not NUMBER.fullmatch(operand):
        raise Refused(f"the operand {operand}")
    if operand[:2].lower() == "0f":
        return int(operand[2:], 16)
    if operand[:2].lower() == "0d":
        return int(operand[2:], 16)
    return int(operand, 0)


def place_of_parameter(kernel: Kernel, name: str) -> int:
    """Where a parameter begins: at a multiple of 64, which is aligned enough for any of them."""
    place = 0
    for other, size in kernel.parameters.items():
        if other == name:
            return place
        place += -(-size // 64) * 64
    raise KeyError(name)


def listed(operand: str) -> list[str]:
    """The operands in `{a, b}`, or the operand itself if it is a single one."""
    if not operand.startswith("{"):
        return [operand]
    return [part.strip() for part in operand.strip("{} ").split(",")]
