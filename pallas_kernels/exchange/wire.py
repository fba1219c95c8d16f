"""How a thread block sends rows to other GPUs, and how it waits for theirs, word by word.

Thread t of the reader receives what thread t of the writer held, so the layout of a row in
registers stays the same. Stores go straight to the other GPU's memory. The block then sets a flag
there, in one thread per GPU, with release in the scope of the system: whoever reads the flag with
acquire in that scope sees what all threads of the block stored before.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import jax_internals as internals
from pallas_kernels.exchange.inboxes import PATIENCE_S, Layout
from pallas_kernels.jax_internals import inline_mgpu, pl, plgpu, ptx
from pallas_kernels.tiles import THREADS

WORDS_PER_STORE = 4
REF, SCALAR = plgpu.RefType(), plgpu.Layout.WG_SPLAT


@dataclasses.dataclass(frozen=True)
class Wire:
    layout: Layout
    hidden: int
    dtype: DTypeLike
    """What is sent of each row: so many numbers of this dtype."""
    registers: Any
    """How a row lies in registers."""

    @property
    def row_bytes(self) -> int:
        return self.hidden * jnp.dtype(self.dtype).itemsize

    @property
    def words(self) -> int:
        """Words of 4 bytes that a thread holds of a row."""
        return self.row_bytes // (4 * THREADS)

    @property
    def per_store(self) -> int:
        return math.gcd(self.words, WORDS_PER_STORE)

    def send(self, addresses, device, number, row, values) -> None:
        """Writes a row to the inboxes of all GPUs, this one's too, from which it is read as those
        of the others are."""
        offset = self.layout.message(number, device) + row * self.row_bytes

        @inline_mgpu(arg_types=(REF, SCALAR, self.registers))
        def store(_, addresses, offset, values) -> None:
            words = internals.words_of(values)
            assert len(words) == self.words, f"{len(words)} words, expected {self.words}"
            for receiver in range(self.layout.devices):
                place = self.piece_of_thread(addresses, internals.int32(receiver), offset)
                for i in range(0, self.words, self.per_store):
                    address = internals.bytes_after(place, i * THREADS * 4)
                    names = ", ".join(f"${1 + k}" for k in range(self.per_store))
                    piece = words[i : i + self.per_store]
                    ptx(f"st.global{self.vector} [$0], {{{names}}};", address, *piece)

        store(addresses, offset, values)

    def receive(self, addresses, device, number, row) -> Sequence[Any]:
        """A row of all GPUs, in their order, from this GPU's inbox."""
        ours = range(self.layout.devices)
        offsets = [self.layout.message(number, d) + row * self.row_bytes for d in ours]
        row_type = plgpu.ShapeDtypeStruct(
            (self.hidden,), jnp.dtype(self.dtype), layout=self.registers
        )

        @inline_mgpu(
            arg_types=(REF, SCALAR, (SCALAR,) * len(offsets)),
            return_type=(row_type,) * len(offsets),
        )
        def read(_, addresses, device, offsets):
            device = internals.number_of(device)
            return tuple(self.row_at(addresses, device, offset) for offset in offsets)

        return read(addresses, device, tuple(offsets))

    def row_at(self, addresses, device, offset):
        place, words = self.piece_of_thread(addresses, device, offset), []
        names = ", ".join(f"${k}" for k in range(self.per_store))
        text = f"ld.global{self.vector} {{{names}}}, [${self.per_store}];"
        types = [internals.int32_type()] * self.per_store
        for i in range(0, self.words, self.per_store):
            address = internals.bytes_after(place, i * THREADS * 4)
            found = ptx(text, address, result_types=types)
            words += found if self.per_store > 1 else [found]
        return internals.array_of_words(words, (self.hidden,), self.dtype, self.registers)

    @property
    def vector(self) -> str:
        return f".v{self.per_store}.b32" if self.per_store > 1 else ".b32"

    def piece_of_thread(self, addresses, device, offset):
        """Where this thread's first words of a row lie in an inbox. The pieces that all threads
        store with one instruction are next to each other."""
        own = internals.sum_over_thread(
            internals.number_of(offset), ((1, THREADS, 4 * self.per_store),)
        )
        return internals.address_of_words(addresses, device, own)

    def signal(self, addresses, device, number, block) -> None:
        """Says to the other GPUs that all rows of this block have been sent."""

        @inline_mgpu(arg_types=(REF, SCALAR, SCALAR, SCALAR))
        def set_flags(_, addresses, device, number, flag) -> None:
            internals.wait_for_warpgroup()
            other, is_other = self.other_device(device)
            with internals.if_true(is_other):
                address = internals.address_of_words(addresses, other, internals.number_of(flag))
                internals.store_flag(address, internals.number_of(number))

        set_flags(addresses, device, number, self.layout.flag(device, block))

    def wait(self, addresses, device, number, block, late) -> None:
        """Waits until all others have said so, one thread for each of them, and writes down for
        whom this block has waited in vain."""

        @inline_mgpu(arg_types=(REF, *(SCALAR,) * 4, REF))
        def wait_for_flags(_, addresses, device, number, flags, patience, late) -> None:
            number, patience = internals.number_of(number), internals.number_of(patience)
            other, is_other = self.other_device(device)
            with internals.if_true(is_other):
                flag = internals.sum_over_thread(
                    internals.number_of(flags), ((1, THREADS, self.layout.flag(1, 0)),)
                )
                own = internals.number_of(device)
                address = internals.address_of_words(addresses, own, flag)
                with internals.if_true(internals.wait_for_flag(address, number, patience)):
                    found = internals.address_of(late)
                    ptx("st.global.b32 [$0], $1;", found, internals.one_more(other))
            internals.wait_for_warpgroup()

        patience = jnp.where(late[block] == 0, PATIENCE_S * 1_000_000, 0)
        flags = self.layout.flag(0, block)
        wait_for_flags(addresses, device, number, flags, patience, late.at[pl.ds(block, 1)])

    def other_device(self, device):
        """The GPU that this thread signals or waits for, and whether there is one."""
        thread = internals.thread_of_warpgroup(THREADS)
        own = internals.number_of(device)
        return thread, internals.is_below_and_not(thread, self.layout.devices, own)
