"""Warps and thread blocks while they run."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from ptx.memory import OF_BLOCK, Global, Memory
from ptx.refusal import Refused, WrongAccess

LANES = 32


class Registers(dict):
    def __missing__(self, name: str) -> np.ndarray:
        raise WrongAccess(f"register {name} is read before it is written")


@dataclasses.dataclass
class Barrier:
    """A barrier in shared memory (mbarrier)."""

    expected: int
    missing: int
    """How many arrivals are missing in this phase."""
    bytes: int = 0
    """Bytes that copies still have to bring in this phase."""
    phase: int = 0
    copies: list[Callable[[], None]] = dataclasses.field(default_factory=list)
    """Copies that report to this barrier and have not been done."""

    def settle(self) -> None:
        """Ends the phase if nothing is missing."""
        if self.missing == 0 and self.bytes == 0:
            self.phase += 1
            self.missing = self.expected


@dataclasses.dataclass
class Block:
    index: tuple[int, int, int]
    sizes: dict[str, int]
    """The values of registers such as %nctaid.x."""
    threads: int
    memory: Global
    shared: Memory
    parameters: Memory
    cluster: list["Block"] = dataclasses.field(default_factory=list)
    rank: int = 0
    """The block's rank in its cluster."""
    barriers: dict[int, Barrier] = dataclasses.field(default_factory=dict)
    """The barriers by their place in shared memory."""
    arrived: dict[int, int] = dataclasses.field(default_factory=dict)
    """How many warps wait at each barrier of `bar.sync`."""
    passed: dict[int, int] = dataclasses.field(default_factory=dict)
    """How often each of these barriers was passed."""
    descriptors: dict[int, Any] = dataclasses.field(default_factory=dict)
    """Descriptors of copies of tensors, by their place in the parameters."""

    def meant(self, address: int) -> tuple["Block", int]:
        """The thread block of the cluster to whose shared memory an address belongs, and the place
        in that memory."""
        rank, place = int(address) >> OF_BLOCK, int(address) & ((1 << OF_BLOCK) - 1)
        return (self.cluster[rank - 1] if rank else self), place

    def barrier(self, address: int) -> Barrier:
        block, place = self.meant(address)
        if place not in block.barriers:
            raise WrongAccess(f"there is no barrier at {place} of {block.shared.name}")
        return block.barriers[place]


@dataclasses.dataclass
class Warp:
    block: Block
    number: int
    registers: Registers = dataclasses.field(default_factory=Registers)
    at: int = 0
    """The next instruction."""
    waits: Callable[[], bool] | None = None
    """A function that says whether what the warp waits for has happened; None if it can go on."""
    done: bool = False
    groups: list[list[Callable[[], None]]] = dataclasses.field(default_factory=list)
    """Groups of copies that it has begun and not awaited, the oldest first."""
    begun: list[Callable[[], None]] = dataclasses.field(default_factory=list)
    """Copies that are in no group yet."""

    @property
    def threads(self) -> np.ndarray:
        return np.arange(LANES, dtype=np.uint32) + np.uint32(LANES * self.number)

    def special(self, name: str) -> np.ndarray:
        """A register such as %tid.x."""
        block = self.block
        if name in ("%tid.x", "%laneid"):
            return self.threads if name == "%tid.x" else np.arange(LANES, dtype=np.uint32)
        found = {"%tid.y": 0, "%tid.z": 0, "%warpid": self.number, "%cluster_ctarank": block.rank}
        found |= {f"%ctaid.{axis}": place for axis, place in zip("xyz", block.index)}
        found |= block.sizes
        if name not in found:
            raise Refused(f"the register {name}")
        return np.full(LANES, found[name], np.uint32)
