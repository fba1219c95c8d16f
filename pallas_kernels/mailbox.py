"""Messages between the warpgroups of a cluster, written into the reader's shared memory.

A message holds registers of one warpgroup. Thread t of the reader receives what thread t of the
writer held, so the layout stays the same. Each box has a barrier (mbarrier) that counts the bytes
that have arrived; only the reader waits for it. `plgpu.async_store_smem` does the same, but every
thread of the writer first waits until the whole GPU can see all of its stores, which takes
microseconds while the memory is busy.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from pallas_kernels.tiles import THREADS, inline_mgpu

FLOATS_PER_STORE = 4
"""Floats that a thread sends with one instruction."""


@dataclasses.dataclass(frozen=True)
class Mailbox:
    boxes: int
    """Boxes of a thread block. One warpgroup reads a box, all of its messages at once."""
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
            first = utils.single_thread_predicate(utils.ThreadSubset.BLOCK)
            for box in range(self.boxes):
                address = utils.memref_ptr(utils.memref_slice(bars, box))
                one = utils.c(1, ir.IntegerType.get_signless(32))
                utils.inline_ptx(
                    "mbarrier.init.shared::cta.b64 [$0], $1;", address, one, predicate=first
                )
                self.expect(barrier(address), first)
            utils.inline_ptx("fence.mbarrier_init.release.cluster;", has_side_effects=True)
            utils.inline_ptx("barrier.cluster.arrive.relaxed.aligned;", has_side_effects=True)

        initialize(scratch["message_bars"])

    def wait_for_barriers(self) -> None:
        """Waits until all thread blocks of the cluster have initialized their barriers.

        Every thread calls it once: writers before they write, the others at any time.
        """

        @inline_mgpu()
        def wait_for_cluster(_) -> None:
            utils.inline_ptx("barrier.cluster.wait.acquire.aligned;", has_side_effects=True)

        wait_for_cluster()

    def expect(self, bar: utils.BarrierRef, predicate) -> None:
        bar.arrive_expect_tx(self.bytes, predicate=predicate)

    def write(self, scratch, box, message, block: int, arrays: Sequence, layouts) -> None:
        """Sends the arrays as a message to a box of thread block `block` of the cluster."""

        @inline_mgpu(arg_types=(tuple(layouts), plgpu.RefType(), plgpu.RefType()))
        def send(_, arrays, message, bars) -> None:
            rank = utils.c(block, ir.IntegerType.get_signless(32))
            remote = lambda ref: utils.get_cluster_ptr(utils.memref_ptr(ref), rank, generic=False)
            target, bar = remote(message), remote(bars)
            floats = [x for array in arrays for x in floats_of(array)]
            assert len(floats) == self.floats, f"{len(floats)} floats, expected {self.floats}"
            for i in range(0, self.floats, FLOATS_PER_STORE):
                utils.inline_ptx(
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
            bar = barrier(utils.memref_ptr(bars))
            bar.wait_parity(utils.c(earlier_reads % 2, ir.IntegerType.get_signless(1)))
            self.expect(bar, utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP))
            return tuple(
                array
                for i in range(self.messages)
                for array in self.arrays_of_message(
                    utils.memref_ptr(utils.memref_slice(messages, i)), shapes, layouts
                )
            )

        messages = scratch["messages"].at[pl.ds(box * self.messages, self.messages)]
        arrays = receive(messages, scratch["message_bars"].at[box])
        per_message = len(message_types)
        return [arrays[i : i + per_message] for i in range(0, len(arrays), per_message)]

    def arrays_of_message(self, source, shapes, layouts) -> tuple:
        floats = []
        for i in range(0, self.floats, FLOATS_PER_STORE):
            floats += utils.inline_ptx(
                "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];",
                thread_address(source, i),
                result_types=[ir.F32Type.get()] * FLOATS_PER_STORE,
                has_side_effects=True,
            )
        arrays, taken = [], 0
        for shape, layout in zip(shapes, layouts):
            array, count = array_of(floats[taken:], shape, layout.to_mgpu())
            arrays.append(array)
            taken += count
        return tuple(arrays)


NO_PHASES: Any = None
"""`BarrierRef` takes a reference to its phases, which a wait by parity does not use."""


def barrier(address) -> utils.BarrierRef:
    return utils.BarrierRef(address, utils.c(0, ir.IntegerType.get_signless(32)), NO_PHASES, 1)


def thread_address(address, i: int):
    """Address of this thread's i-th float in a message. The pieces of FLOATS_PER_STORE floats that
    all threads send with one instruction are next to each other."""
    number = ir.IntegerType.get_signless(32)
    thread = arith.remui(utils.thread_idx(), utils.c(THREADS, number))
    within_piece = arith.muli(thread, utils.c(FLOATS_PER_STORE, number))
    offset = arith.addi(within_piece, utils.c(i * THREADS, number))
    return utils.getelementptr(address, [offset], ir.F32Type.get())


def floats_of(array: mgpu.FragmentedArray) -> list:
    return [
        vector.extract(register, [], [i])
        for register in array.registers.flat
        for i in range(math.prod(ir.VectorType(register.type).shape))
    ]


def array_of(floats: list, shape: tuple[int, ...], layout) -> tuple[mgpu.FragmentedArray, int]:
    """An array made from the first of the floats, and the number of floats it took."""
    register_type = layout.registers_element_type(ir.F32Type.get())
    width = math.prod(ir.VectorType(register_type).shape)
    registers = np.empty(layout.registers_shape(shape), dtype=object)
    for i in range(registers.size):
        registers.flat[i] = vector.from_elements(register_type, floats[i * width : (i + 1) * width])
    array = mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)
    return array, registers.size * width
