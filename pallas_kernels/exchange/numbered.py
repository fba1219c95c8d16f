"""Small arrays that a thread block sends to other GPUs, with a number beside every word.

A flag costs two ways: the rows must have arrived before it may be set. Here a reader sees by each
word whether it has arrived, so words travel once and in any order, for twice the bytes. Thread t of
the reader receives what thread t of the writer held, and waits for nothing else.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import jax_internals as internals
from pallas_kernels.exchange.inboxes import BLOCKS, NUMBERED, PATIENCE_S, Layout
from pallas_kernels.exchange.wire import scalars
from pallas_kernels.jax_internals import inline_mgpu, pl, plgpu, ptx
from pallas_kernels.tiles import THREADS

REF, SCALAR = plgpu.RefType(), plgpu.Layout.WG_SPLAT
WORDS_PER_STORE = 2
STORE_BYTES = WORDS_PER_STORE * 4 * NUMBERED
NO_NUMBERS = 0x7FC07FC0
"""Two numbers in bfloat16 that are NaN."""


@dataclasses.dataclass(frozen=True)
class Numbered:
    layout: Layout
    shape: tuple[int, ...]
    """The shape of one array, of which each thread holds two words."""
    dtype: DTypeLike
    registers: Any
    """How an array lies in registers."""

    @property
    def bytes(self) -> int:
        """What one array takes of a message."""
        return STORE_BYTES * THREADS

    def send(self, addresses, device, number, place, values) -> None:
        """Writes an array to the inboxes of all GPUs, this one's too, from which it is read as
        those of the others are. `place` is its offset in the message."""
        offset = self.layout.numbered_message(number, device) + place
        receivers = scalars([*self.layout.others(device), device])

        @inline_mgpu(arg_types=(REF, (SCALAR,) * len(receivers), SCALAR, SCALAR, self.registers))
        def store(_, addresses, receivers, offset, number, values) -> None:
            words = internals.words_of(values)
            assert len(words) == WORDS_PER_STORE, f"{len(words)} words, expected {WORDS_PER_STORE}"
            number = internals.number_of(number)
            cells = [internals.numbered(word, number) for word in words]
            for receiver in map(internals.number_of, receivers):
                address = self.of_thread(addresses, receiver, offset)
                ptx("st.relaxed.sys.global.v2.b64 [$0], {$1, $2};", address, *cells)

        store(addresses, receivers, offset, number, values)

    def receive(self, addresses, device, number, place, late, block) -> Sequence[Any]:
        """Waits for this array of all GPUs and returns them, in the order of the GPUs, from this
        GPU's inbox. An array for which it waited in vain is NaN, and `late` has its GPU."""
        slot = block % BLOCKS
        offsets = [
            self.layout.numbered_message(number, sender) + place
            for sender in range(self.layout.devices)
        ]
        array = plgpu.ShapeDtypeStruct(self.shape, jnp.dtype(self.dtype), layout=self.registers)

        @inline_mgpu(
            arg_types=(REF, SCALAR, SCALAR, SCALAR, (SCALAR,) * len(offsets), REF),
            return_type=(array,) * len(offsets),
        )
        def read(_, addresses, device, number, patience, offsets, late):
            device, number, patience = map(internals.number_of, (device, number, patience))
            found = []
            for sender, offset in enumerate(offsets):
                address = self.of_thread(addresses, device, offset)
                words, missing = internals.wait_for_numbered(address, number, patience)
                with internals.if_true(missing):
                    name = internals.int32(sender + 1)
                    ptx("st.global.b32 [$0], $1;", internals.address_of(late), name)
                nothing = internals.int32(NO_NUMBERS)
                words = [internals.chosen(missing, nothing, word) for word in words]
                found.append(
                    internals.array_of_words(words, self.shape, self.dtype, self.registers)
                )
            return tuple(found)

        patience = jnp.where(late[slot] == 0, PATIENCE_S * 1_000_000, 0)
        given = addresses, device, number, patience, tuple(offsets), late.at[pl.ds(slot, 1)]
        return read(*given)

    def of_thread(self, addresses, device, offset):
        """Where this thread's words lie in an inbox."""
        offset = internals.number_of(offset)
        own = internals.sum_over_thread(offset, ((1, THREADS, STORE_BYTES),))
        return internals.address_of_words(addresses, device, own)
