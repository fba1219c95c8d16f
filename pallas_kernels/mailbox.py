"""Messages between the warpgroups of a cluster, written into the reader's shared memory.

A message holds registers of one warpgroup. Thread t of the reader receives what thread t of the
writer held, so the layout stays the same. Each box has a barrier (mbarrier) that counts the bytes
that have arrived; only the reader waits for it. `plgpu.async_store_smem` does the same, but every
thread of the writer first waits until the whole GPU can see all of its stores, which takes
microseconds while the memory is busy.
"""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp

from pallas_kernels import jax_internals as internals
from pallas_kernels.jax_internals import inline_mgpu, pl, plgpu, ptx
from pallas_kernels.tiles import THREADS

FLOATS_PER_STORE = 4
"""Floats that a thread sends with one instruction."""


@dataclasses.dataclass(frozen=True)
class Mailbox:
    boxes: int
    """Boxes of a thread block. One warpgroup reads a box, with all of its messages at once."""
    messages: int
    """Messages in a box, each from another writer."""
    floats: int
    """Floats of a message per thread."""

    @property
    def size(self) -> int:
        """Floats of one message."""
        return self.floats * THREADS

    @property
    def bytes(self) -> int:
        """Size of a box: the reader waits until this many bytes have arrived."""
        return self.messages * self.size * 4

    def scratch(self) -> dict:
        assert self.floats % FLOATS_PER_STORE == 0, "a message is a whole number of stores"
        return {
            "messages": plgpu.SMEM((self.boxes * self.messages, self.size), jnp.float32),
            "message_bars": plgpu.SMEM((self.boxes, 2), jnp.int32),
        }

    def init_barriers(self, scratch) -> None:
        """Initializes this thread block's barriers and arrives at the cluster barrier.

        All threads of all thread blocks call it before anything else.
        """

        @inline_mgpu(arg_types=(plgpu.RefType(),))
        def initialize(_, bars) -> None:
            first = internals.one_thread_of("block")
            for box in range(self.boxes):
                address, one = internals.address_of(bars, box), internals.int32(1)
                ptx("mbarrier.init.shared::cta.b64 [$0], $1;", address, one, predicate=first)
                internals.expect_bytes(internals.barrier_at(address), self.bytes, first)
            ptx("fence.mbarrier_init.release.cluster;")
            ptx("barrier.cluster.arrive.relaxed.aligned;")

        initialize(scratch["message_bars"])

    def wait_for_barriers(self) -> None:
        """Waits until all thread blocks of the cluster have initialized their barriers.

        Every thread calls it once: writers before they write, the others at any time.
        """

        @inline_mgpu()
        def wait_for_cluster(_) -> None:
            ptx("barrier.cluster.wait.acquire.aligned;")

        wait_for_cluster()

    def write(self, scratch, box, message, block: int, arrays: Sequence, layouts) -> None:
        """Sends the arrays as a message to a box of thread block `block` of the cluster."""

        @inline_mgpu(arg_types=(tuple(layouts), plgpu.RefType(), plgpu.RefType()))
        def send(_, arrays, message, bars) -> None:
            rank = internals.int32(block)
            target = internals.address_in_block(message, rank)
            bar = internals.address_in_block(bars, rank)
            floats = [x for array in arrays for x in internals.floats_of(array)]
            assert len(floats) == self.floats, f"{len(floats)} floats, expected {self.floats}"
            for i in range(0, self.floats, FLOATS_PER_STORE):
                ptx(
                    "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32"
                    " [$0], {$1, $2, $3, $4}, [$5];",
                    thread_address(target, i),
                    *floats[i : i + FLOATS_PER_STORE],
                    bar,
                )

        send(
            tuple(arrays),
            scratch["messages"].at[box * self.messages + message],
            scratch["message_bars"].at[box],
        )

    def read(self, scratch, box, earlier_reads: int, shapes: Sequence, layouts) -> list[tuple]:
        """Waits for all messages of a box and returns them, in the order of their writers."""
        message_types = tuple(
            plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.float32), layout=layout)
            for shape, layout in zip(shapes, layouts)
        )

        @inline_mgpu(
            arg_types=(plgpu.RefType(), plgpu.RefType()),
            return_type=message_types * self.messages,
        )
        def receive(_, messages, bars):
            bar = internals.barrier_at(internals.address_of(bars))
            internals.wait_by_parity(bar, earlier_reads % 2)
            internals.expect_bytes(bar, self.bytes, internals.one_thread_of("warpgroup"))
            return tuple(
                array
                for i in range(self.messages)
                for array in self.arrays_of_message(
                    internals.address_of(messages, i), shapes, layouts
                )
            )

        messages = scratch["messages"].at[pl.ds(box * self.messages, self.messages)]
        arrays = receive(messages, scratch["message_bars"].at[box])
        per_message = len(message_types)
        return [arrays[i : i + per_message] for i in range(0, len(arrays), per_message)]

    def arrays_of_message(self, source, shapes, layouts) -> tuple:
        floats = []
        for i in range(0, self.floats, FLOATS_PER_STORE):
            floats += ptx(
                "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];",
                thread_address(source, i),
                result_types=[internals.float32_type()] * FLOATS_PER_STORE,
            )
        arrays, taken = [], 0
        for shape, layout in zip(shapes, layouts):
            array, count = internals.array_of(floats[taken:], shape, layout)
            arrays.append(array)
            taken += count
        return tuple(arrays)


def thread_address(address, i: int):
    """Address of this thread's i-th float in a message. The pieces of FLOATS_PER_STORE floats that
    all threads send with one instruction are next to each other."""
    return internals.float_address_of_thread(address, THREADS, FLOATS_PER_STORE, i * THREADS)
