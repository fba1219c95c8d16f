"""Numbers that warpgroups of a cluster leave in each other's shared memory.

A note is what one warpgroup holds in registers; the reader's threads get what the same threads of
the writer held, so nothing is laid out in between. The barrier of a box counts bytes: nobody waits
but the reader. `plgpu.async_store_smem` does the same after every thread of the writer has waited
for all of its stores to be seen by the whole GPU, microseconds while the memory is busy.
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

TOGETHER = 4
"""Floats that a thread sends at once."""


@dataclasses.dataclass(frozen=True)
class Mailbox:
    boxes: int
    """Each is read by one warpgroup, all of its notes together."""
    notes: int
    """Of a box, each from one writer."""
    floats: int
    """Of a note, per thread."""

    @property
    def size(self) -> int:
        """Of one note."""
        return self.floats * THREADS

    @property
    def bytes(self) -> int:
        """Of everything a reader waits for."""
        return self.notes * self.size * 4

    def scratch(self) -> dict:
        assert self.floats % TOGETHER == 0, "notes of whole pieces"
        return {
            "notes": plgpu.SMEM((self.boxes * self.notes, self.size), jnp.float32),
            "note_bars": plgpu.SMEM((self.boxes, 2), jnp.int32),
        }

    def open(self, scratch) -> None:
        """Before anything else, by all threads of all blocks."""

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

        initialize(scratch["note_bars"])

    def opened(self) -> None:
        """Until all blocks have opened theirs; once, by all threads: by writers before they write,
        by the others whenever it suits them."""

        @inline_mgpu()
        def until_all(_) -> None:
            utils.inline_ptx("barrier.cluster.wait.acquire.aligned;", has_side_effects=True)

        until_all()

    def expect(self, bar: utils.BarrierRef, predicate) -> None:
        bar.arrive_expect_tx(self.bytes, predicate=predicate)

    def write(self, scratch, box, note, block: int, arrays: Sequence, layouts) -> None:
        """Into a box of a block of the cluster."""

        @inline_mgpu(arg_types=(tuple(layouts), plgpu.RefType(), plgpu.RefType()))
        def send(_, arrays, slots, bars) -> None:
            rank = utils.c(block, ir.IntegerType.get_signless(32))
            there = lambda ref: utils.get_cluster_ptr(utils.memref_ptr(ref), rank, generic=False)
            target, bar = there(slots), there(bars)
            floats = [x for array in arrays for x in floats_of(array)]
            assert len(floats) == self.floats, f"{len(floats)} floats for {self.floats}"
            for i in range(0, self.floats, TOGETHER):
                utils.inline_ptx(
                    "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32"
                    " [$0], {$1, $2, $3, $4}, [$5];",
                    place(target, i),
                    *floats[i : i + TOGETHER],
                    bar,
                )

        send(
            tuple(arrays),
            scratch["notes"].at[box * self.notes + note],
            scratch["note_bars"].at[box],
        )

    def read(self, scratch, box, turn: int, shapes: Sequence, layouts) -> list[tuple]:
        """All notes of a box, in order; `turn` counts how often it has been read."""
        given = tuple(
            plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=layout)
            for shape, layout in zip(shapes, layouts)
        )

        @inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()), return_type=given * self.notes)
        def receive(_, slots, bars):
            bar = barrier(utils.memref_ptr(bars))
            bar.wait_parity(utils.c(turn % 2, ir.IntegerType.get_signless(1)))
            self.expect(bar, utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP))
            return tuple(
                array
                for i in range(self.notes)
                for array in self.note(
                    utils.memref_ptr(utils.memref_slice(slots, i)), shapes, layouts
                )
            )

        notes = scratch["notes"].at[pl.ds(box * self.notes, self.notes)]
        arrays = receive(notes, scratch["note_bars"].at[box])
        return [arrays[i : i + len(given)] for i in range(0, len(arrays), len(given))]

    def note(self, source, shapes, layouts) -> tuple:
        floats = []
        for i in range(0, self.floats, TOGETHER):
            floats += utils.inline_ptx(
                "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];",
                place(source, i),
                result_types=[ir.F32Type.get()] * TOGETHER,
                has_side_effects=True,
            )
        arrays, taken = [], 0
        for shape, layout in zip(shapes, layouts):
            array, count = array_of(floats[taken:], shape, layout.to_mgpu())
            arrays.append(array)
            taken += count
        return tuple(arrays)


NO_PHASES: Any = None
"""Of barriers that are waited for with a parity; jax's types want some."""


def barrier(address) -> utils.BarrierRef:
    return utils.BarrierRef(address, utils.c(0, ir.IntegerType.get_signless(32)), NO_PHASES, 1)


def place(address, i: int):
    """Where a thread's i-th float is: pieces of all threads side by side."""
    number = ir.IntegerType.get_signless(32)
    thread = arith.remui(utils.thread_idx(), utils.c(THREADS, number))
    offset = arith.addi(arith.muli(thread, utils.c(TOGETHER, number)), utils.c(i * THREADS, number))
    return utils.getelementptr(address, [offset], ir.F32Type.get())


def floats_of(array: mgpu.FragmentedArray) -> list:
    return [
        vector.extract(register, [], [i])
        for register in array.registers.flat
        for i in range(math.prod(ir.VectorType(register.type).shape))
    ]


def array_of(floats: list, shape: tuple[int, ...], layout) -> tuple[mgpu.FragmentedArray, int]:
    """An array of the first floats, and how many they are."""
    kind = layout.registers_element_type(ir.F32Type.get())
    width = math.prod(ir.VectorType(kind).shape)
    registers = np.empty(layout.registers_shape(shape), dtype=object)
    for i in range(registers.size):
        registers.flat[i] = vector.from_elements(kind, floats[i * width : (i + 1) * width])
    array = mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)
    return array, registers.size * width
