"""How a thread block sends rows to other GPUs, and how it waits for theirs, word by word.

Thread t of the reader receives what thread t of the writer held, so the layout of a row in
registers stays the same. Stores go straight to the other GPU's memory. The block then sets a flag
there, in one thread per GPU, with release in the scope of the system: whoever reads the flag with
acquire in that scope sees what all threads of the block stored before.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import jax_internals as internals
from pallas_kernels.exchange.inboxes import Layout
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

    def send(self, addresses, device, number, row, values, receivers: Sequence[Any]) -> None:
        """Writes a row to the inboxes of some GPUs. This one may be among them: it reads its own
        rows from its inbox, as those of the others."""
        offset = self.layout.message(number, device) + row * self.row_bytes
        receivers = scalars(receivers)

        @inline_mgpu(arg_types=(REF, (SCALAR,) * len(receivers), SCALAR, self.registers))
        def store(_, addresses, receivers, offset, values) -> None:
            words = internals.words_of(values)
            assert len(words) == self.words, f"{len(words)} words, expected {self.words}"
            for receiver in receivers:
                place = self.piece_of_thread(addresses, internals.number_of(receiver), offset)
                for i in range(0, self.words, self.per_store):
                    address = internals.bytes_after(place, i * THREADS * 4)
                    names = ", ".join(f"${1 + k}" for k in range(self.per_store))
                    piece = words[i : i + self.per_store]
                    ptx(f"st.global{self.vector} [$0], {{{names}}};", address, *piece)

        store(addresses, receivers, offset, values)

    def receive(self, addresses, device, number, row, senders: Iterable[Any]) -> Sequence[Any]:
        """A row of each of these GPUs, from this GPU's inbox."""
        offsets = [self.layout.message(number, d) + row * self.row_bytes for d in senders]
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

    def signal(self, addresses, device, number, block, receivers: Sequence[Any]) -> None:
        """Says to other GPUs that all rows of this block have been sent to them."""
        receivers = scalars(receivers)

        @inline_mgpu(arg_types=(REF, (SCALAR,) * len(receivers), SCALAR, SCALAR))
        def set_flags(_, addresses, receivers, number, flag) -> None:
            internals.wait_for_warpgroup()
            [receiver], has_one = of_thread(receivers)
            with internals.if_true(has_one):
                address = internals.address_of_words(addresses, receiver, internals.number_of(flag))
                internals.store_flag(address, internals.number_of(number))

        set_flags(addresses, receivers, number, self.layout.flag(device, block))

    def wait(
        self, addresses, device, number, block, late, senders: Sequence[Any], seconds: int
    ) -> None:
        """Waits until these GPUs have said so, one thread for each of them, and writes down for
        whom this block has waited in vain."""
        flags = scalars([self.layout.flag(sender, block) for sender in senders])
        senders = scalars(senders)

        @inline_mgpu(arg_types=(REF, SCALAR, SCALAR, *[(SCALAR,) * len(senders)] * 2, SCALAR, REF))
        def wait_for_flags(_, addresses, device, number, senders, flags, patience, late) -> None:
            device, number, patience = map(internals.number_of, (device, number, patience))
            [sender, flag], has_one = of_thread(senders, flags)
            with internals.if_true(has_one):
                address = internals.address_of_words(addresses, device, flag)
                with internals.if_true(internals.wait_for_flag(address, number, patience)):
                    found = internals.address_of(late)
                    ptx("st.global.b32 [$0], $1;", found, internals.one_more(sender))
            internals.wait_for_warpgroup()

        patience = jnp.where(late[block] == 0, seconds * 1_000_000, 0)
        given = senders, flags, patience, late.at[pl.ds(block, 1)]
        wait_for_flags(addresses, device, number, *given)


def of_thread(*lists: Sequence[Any]) -> tuple[list[Any], Any]:
    """Which entry of each of these lists, all of one length, belongs to this thread, and whether
    it has one: thread 0 has the first."""
    thread, [count] = internals.thread_of_warpgroup(THREADS), {len(values) for values in lists}

    def entry(values: Sequence[Any]) -> Any:
        *before, found = map(internals.number_of, values)
        for i in reversed(range(len(before))):
            found = internals.chosen(internals.is_below(thread, i + 1), before[i], found)
        return found

    return [entry(values) for values in lists], internals.is_below(thread, count)


def scalars(numbers: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(map(jnp.int32, numbers))
