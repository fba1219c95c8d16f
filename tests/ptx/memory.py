"""Global and shared memory. Every bit that was not written is 1, which is NaN in every
floating-point type, and an integer that is no valid index."""

import numpy as np

from ptx.refusal import WrongAccess

POISON = 0xFF
FAR_APART = 36
"""Bits of an address within an array in global memory. The bits above say which array it is."""
OF_BLOCK = 24
"""Bits of an address in shared memory. Those above are the block's rank in its cluster plus one, or
zero for the thread block's own."""
PARAMETERS = 0xFF << 48
"""The address of the parameters of a kernel."""


class Memory:
    """Bytes that begin at an address."""

    def __init__(self, name: str, held: np.ndarray, begins: int = 0) -> None:
        self.name, self.begins = name, begins
        self.bytes = held.reshape(-1).view(np.uint8)

    def places(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """The indices of the `size` bytes at each address."""
        first = addresses.astype(np.int64) - self.begins
        wrong = (first < 0) | (first + size > self.bytes.size) | (first % size != 0)
        if wrong.any():
            at = int(first[wrong][0])
            raise WrongAccess(f"{size} bytes at {at} of {self.name}, of {self.bytes.size} bytes")
        return first[:, None] + np.arange(size)

    def load(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """The bytes at each address, as rows."""
        return self.bytes[self.places(addresses, size)]

    def store(self, addresses: np.ndarray, rows: np.ndarray) -> None:
        self.bytes[self.places(addresses, rows.shape[1])] = rows


class Global:
    """Arrays, each far from the others so that no index leads from one into another."""

    def __init__(self) -> None:
        self.arrays: dict[int, Memory] = {}

    def add(self, name: str, array: np.ndarray) -> int:
        """Adds an array and returns its address. The array itself is read and written."""
        address = (len(self.arrays) + 1) << FAR_APART
        self.arrays[address >> FAR_APART] = Memory(name, array, address)
        return address

    def array_at(self, address: int) -> Memory:
        found = self.arrays.get(int(address) >> FAR_APART)
        if found is None:
            raise WrongAccess(f"the address {int(address):#x}, where no array is")
        return found

    def load(self, addresses: np.ndarray, size: int) -> np.ndarray:
        rows = np.empty((addresses.size, size), np.uint8)
        for which, memory in self.of_each(addresses):
            rows[which] = memory.load(addresses[which], size)
        return rows

    def store(self, addresses: np.ndarray, rows: np.ndarray) -> None:
        for which, memory in self.of_each(addresses):
            memory.store(addresses[which], rows[which])

    def of_each(self, addresses: np.ndarray):
        """The arrays to which the addresses belong, each with a mask of its addresses."""
        array = addresses >> np.uint64(FAR_APART)
        if (array == array[0]).all():
            return [(slice(None), self.array_at(addresses[0]))]
        return [(array == one, self.array_at(int(one) << FAR_APART)) for one in np.unique(array)]


def shared_of(name: str, size: int) -> Memory:
    return Memory(name, np.full(size, POISON, np.uint8))
