"""Runs the program of the host, which decides which array is which parameter of the kernel, what
copies of tensors take, and how many thread blocks there are.

The compiler prints that program as LLVM IR. It has no branches: it moves addresses around, fills in
structures and calls two functions of Mosaic's runtime.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from ptx.refusal import require

ASSIGNED = re.compile(r"(?:(%\d+) = )?(?:call \S+ @)?(\w+)\b(.*?)(?:, align \d+)?")
VALUE = re.compile(r"%\d+|(?<![\w%])-?\d+|undef|poison")
BITS_OF_TMA_TYPES = {1: 8, 2: 16, 3: 32, 4: 64, 5: 16, 6: 32, 7: 16}
SIZES = {"i8": 1, "bfloat": 2, "half": 2, "i16": 2, "float": 4, "i32": 4, "i64": 8, "double": 8}
NO_SWIZZLE = 16


class OfArray(NamedTuple):
    """An address in one of the arrays that the kernel is called with."""

    array: int
    offset: int = 0


class Descriptor(NamedTuple):
    """The part of an array that a copy of a tensor takes, with the innermost axis last."""

    source: OfArray
    bits: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int


class Slot(NamedTuple):
    """A place in a piece of the host's memory."""

    piece: dict[int, Any]
    at: int = 0


class Arguments(NamedTuple):
    """A place in the list of arrays."""

    at: int = 0


@dataclasses.dataclass(frozen=True)
class Launch:
    grid: tuple[int, ...]
    cluster: tuple[int, ...]
    """Zeros if there are no clusters of thread blocks."""
    threads: int
    shared_bytes: int
    parameters: tuple[OfArray | dict[int, Descriptor], ...]
    """An address, or descriptors by the byte at which they begin."""


def launch_of(text: str) -> Launch:
    """The launch of the one kernel that the printed program launches."""
    begun = re.search(r"^define (?:i32|void) @\w+\((.*)\) \{$", text, re.MULTILINE)
    require(begun, "the compiler printed no program of the host")
    assert begun
    host = Host(begun[1].replace("ptr ", "").split(", "))
    body = text[begun.start() :]
    for line in body[: body.index("\n}")].splitlines():
        host.run(line.strip())
    require(len(host.launches) == 1, f"{len(host.launches)} launches in one program")
    return host.launches[0]


class Host:
    def __init__(self, parameters: Sequence[str]) -> None:
        """The last parameter is the list of arrays; those before it are the runtime's."""
        *others, arrays = parameters
        self.values: dict[str, Any] = dict.fromkeys(others) | {arrays: Arguments()}
        self.launches: list[Launch] = []

    def run(self, line: str) -> None:
        found = ASSIGNED.fullmatch(line)
        act = found and getattr(self, f"do_{found[2]}", None)
        if found and act:
            made = act(found[3])
            if found[1]:
                self.values[found[1]] = made
        else:
            require(not line.startswith(("%", "store", "br ", "call")), f"on the host: {line}")

    def all(self, text: str) -> list:
        """The values and numbers that follow the types in a line."""
        return [self.value(name) for name in VALUE.findall(re.sub(r"\[\d+ x \w+\]", "", text))]

    def value(self, name: str) -> Any:
        if name in ("undef", "poison"):
            return {}
        return self.values[name] if name.startswith("%") else int(name)

    def do_alloca(self, text: str) -> Slot:
        return Slot({})

    def do_getelementptr(self, text: str) -> Any:
        base, *steps = self.all(re.sub(r"\{.*?\}", "", text))
        if isinstance(base, OfArray):
            size = SIZES[text.split(",")[0].split()[-1]]
            return base._replace(offset=base.offset + steps[0] * size)
        return base._replace(at=base.at + steps[-1])

    def do_load(self, text: str) -> Any:
        (place,) = self.all(text)
        if isinstance(place, Arguments):
            return OfArray(place.at)
        return dict(place.piece) if "x i8]" in text else place.piece[place.at]

    def do_store(self, text: str) -> None:
        value, place = self.all(text)
        place.piece[place.at] = value

    def do_insertvalue(self, text: str) -> dict:
        structure, value, *path = self.all(re.sub(r"\{.*?\}", "", text))
        return structure | {tuple(path): value}

    def do_extractvalue(self, text: str) -> Any:
        structure, *path = self.all(re.sub(r"\{.*?\}", "", text))
        return structure[tuple(path)]

    def do_ptrtoint(self, text: str) -> Any:
        return self.all(text)[0]

    do_inttoptr = do_ptrtoint

    def do_mul(self, text: str) -> int:
        one, other = self.all(text)
        return one * other

    def do_add(self, text: str) -> Any:
        """The sum of an address, or a number, and a number of bytes."""
        one, other = self.all(text)
        if isinstance(one, OfArray):
            return one._replace(offset=one.offset + other)
        if isinstance(one, Slot):
            return one._replace(at=one.at + other // SIZES["i64"])
        return one + other

    def do_mosaic_gpu_init_tma_desc(self, text: str) -> None:
        place, source, kind, rank, *rest = self.all(text)
        sizes, strides, swizzle, box = rest
        several = lambda slot: tuple(slot.piece[slot.at + i] for i in range(rank))
        chosen = swizzle if swizzle in (32, 64, 128) else NO_SWIZZLE
        require(kind in BITS_OF_TMA_TYPES, f"copies of Mosaic's type {kind}")
        axes = several(sizes), several(strides), several(box)
        place.piece[place.at] = Descriptor(source, BITS_OF_TMA_TYPES[kind], *axes, chosen)

    def do_mosaic_gpu_launch_kernel(self, text: str) -> None:
        _, *numbers, _, parameters = self.all(text)
        self.launch(numbers, parameters)

    def do_mosaic_gpu_build_kernel_spec(self, text: str) -> None:
        """The call in the form of jax 0.12 and later, which has a kind for each parameter."""
        _, *numbers, _, parameters, _ = self.all(text)
        self.launch(numbers, parameters)

    def launch(self, numbers: Sequence[int], parameters: Slot) -> None:
        grid, cluster, block = (tuple(numbers[i : i + 3]) for i in (0, 3, 6))
        require(block[1:] == (1, 1), f"a thread block of {block} threads")
        slots = [parameters.piece[i] for i in sorted(parameters.piece)]
        held = tuple(parameter_in(slot) for slot in slots)
        self.launches.append(Launch(grid, cluster, block[0], numbers[9], held))


def parameter_in(slot: Slot) -> OfArray | dict[int, Descriptor]:
    """A parameter of the kernel. Since jax 0.12 a descriptor is a parameter by itself."""
    held = slot.piece[slot.at]
    return {0: held} if isinstance(held, Descriptor) else held
