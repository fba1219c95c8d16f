"""Every private or experimental interface of jax that the kernels use, in one file.

(`kept/later.py` has those for calling lowered kernels and `kept/compiled.py` those for compiled
ones, because this file imports Mosaic.)

jax may rename or change these in any version, so pyproject.toml allows only versions with which the
kernels were tested. Other files import `pl` and `plgpu` from here and use nothing else that is
experimental. tests/pallas_kernels/test_jax_internals.py tries each interface by itself and names
the one that broke.

The functions below are called inside `inline_mgpu`, which takes code instruction by instruction.
"""

import math
from typing import Any, Literal

import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref, scf, vector

__all__ = ["pl", "plgpu"]

# jax imports ACC into this module but does not list it as public.
Accumulator = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
"""Accumulator registers of a matrix instruction (wgmma)."""


def inline_mgpu(arg_types: tuple = (), return_type: Any = None) -> Any:
    """`plgpu.inline_mgpu`. Its own type asks callers for a context, which jax passes by itself."""
    return plgpu.inline_mgpu(arg_types=arg_types, return_type=return_type)


def tiling(tile: tuple[int, ...]) -> plgpu.TilingTransform:
    # The transform has an abstract method that jax does not implement and that is not needed here.
    return plgpu.TilingTransform(tile)  # pyright: ignore[reportAbstractUsage]


def swizzle(size: int) -> plgpu.SwizzleTransform:
    return plgpu.SwizzleTransform(size)  # pyright: ignore[reportAbstractUsage]


STORES_ANY_LAYOUT = hasattr(plgpu, "store")
"""Whether `store` can write to memory whose tiles differ from those of the registers."""


def store(ref, value) -> None:
    """Stores registers, even if that writes only parts of sectors. jax 0.11 has no `plgpu.store`,
    and there an assignment does the same."""
    if jax_store := getattr(plgpu, "store", None):
        jax_store(ref, value, optimized=False)
    else:
        ref[...] = value


# Instructions and numbers


def ptx(text: str, *operands, predicate=None, result_types=None) -> Any:
    """Inline PTX that the compiler neither moves nor leaves out."""
    return utils.inline_ptx(
        text, *operands, predicate=predicate, result_types=result_types, has_side_effects=True
    )


def int32(value: int):
    return utils.c(value, ir.IntegerType.get_signless(32))


def float32_type() -> Any:
    return ir.F32Type.get()


def one_thread_of(threads: Literal["block", "warpgroup"]):
    """True in one thread of the thread block or of the warpgroup."""
    return utils.single_thread_predicate(utils.ThreadSubset[threads.upper()])


def wait_for_warpgroup() -> None:
    """A barrier of the threads of one warpgroup."""
    utils.warpgroup_barrier()


# Addresses


def address_of(ref, index: int | None = None):
    """The address of an array in memory, or of one of its entries along the first axis."""
    return utils.memref_ptr(ref if index is None else utils.memref_slice(ref, index))


def address_in_block(ref, block):
    """The address of the same array of shared memory in another thread block of the cluster."""
    return utils.get_cluster_ptr(utils.memref_ptr(ref), block, generic=False)


def address_of_one(refs, index):
    """The address of one of several arrays, which is chosen by its number."""
    address = address_of(refs[0])
    for i, ref in enumerate(refs[1:], 1):
        is_it = arith.cmpi(arith.CmpIPredicate.eq, index, int32(i))
        address = arith.select(is_it, address_of(ref), address)
    return address


def memory_at(address, offset, shape: tuple[int, ...], strides: tuple[int, ...], like):
    """Memory with these strides from the number `offset` after an address on, of numbers as in the
    array `like`."""
    dtype = ir.MemRefType(like.type).element_type
    layout = ir.StridedLayoutAttr.get(0, strides)
    begin = utils.getelementptr(address, [offset], dtype)
    return utils.ptr_as_memref(begin, ir.MemRefType.get(shape, dtype, layout))


def load_at(memory, layout) -> mgpu.FragmentedArray:
    layout, array = layout.to_mgpu(), mgpu.FragmentedArray
    if isinstance(layout, mgpu.WGStridedFragLayout):
        return array.load_strided(memory, vec_size=layout.vec_size)
    return array.load_untiled(memory, layout=layout, optimized=False)


def store_at(memory, array: mgpu.FragmentedArray) -> None:
    array.store_untiled(memory, optimized=False)


def float_address_of_thread(address, threads: int, floats_per_thread: int, first: int):
    """The address of this thread's piece of floats, if all threads of a warpgroup have pieces next
    to each other, from the float `first` on."""
    thread = arith.remui(utils.thread_idx(), int32(threads))
    within_piece = arith.muli(thread, int32(floats_per_thread))
    offset = arith.addi(within_piece, int32(first))
    return utils.getelementptr(address, [offset], ir.F32Type.get())


def address_of_float(ref, index):
    """The address of a float in memory, counted from the first of an array."""
    return utils.getelementptr(address_of(ref), [index], ir.F32Type.get())


def shared_address(ref):
    """The address of an array in shared memory as an integer of 32 bits."""
    return ptx("mov.b32 $0, $1;", utils.memref_ptr(ref), result_types=int32_type())


def sum_over_thread(address, strides: tuple[tuple[int, int, int], ...]):
    """An integer plus `stride * (thread // divisor % size)` for each (divisor, size, stride), where
    `thread` counts the threads of this warpgroup."""
    for divisor, size, stride in strides:
        index = arith.remui(arith.divui(utils.thread_idx(), int32(divisor)), int32(size))
        address = arith.addi(address, arith.muli(index, int32(stride)))
    return address


# Barriers in shared memory (mbarrier) that count the bytes that have arrived

NO_PHASES: Any = None
"""`BarrierRef` takes a reference to its phases, which a wait by parity does not use."""


def barrier_at(address) -> utils.BarrierRef:
    return utils.BarrierRef(address, int32(0), NO_PHASES, 1)


def expect_bytes(barrier: utils.BarrierRef, count: int, predicate) -> None:
    barrier.arrive_expect_tx(count, predicate=predicate)


def wait_by_parity(barrier: utils.BarrierRef, parity: int) -> None:
    barrier.wait_parity(utils.c(parity, ir.IntegerType.get_signless(1)))


# Counters in global memory


def signal_counter(counters, index: int) -> None:
    """Adds one to a counter, after all earlier stores of this thread."""
    _semaphore(counters, index).signal(1, memory_scope="gpu")


def wait_for_counter(counters, index: int, calls, per_call: int) -> None:
    """Waits until a counter is at least `per_call` times the first number of `calls`.

    All threads of the warpgroup's first warp ask together. jax has only one of them ask; then the
    others of its warp may run on meanwhile, and code of ptxas 13.0 was seen in which they write
    over a register that the warp shares and that holds half of the counter's address.
    """
    number = memref.load(calls, [utils.c(0, ir.IndexType.get())])
    wanted, address = arith.muli(number, int32(per_call)), address_of(counters, index)
    with if_true(arith.cmpi(arith.CmpIPredicate.eq, _warp_of_warpgroup(), int32(0))):
        loop = scf.WhileOp([], [])
        with ir.InsertionPoint(loop.before.blocks.append()):
            behind = ptx(ANY_BEHIND, address, wanted, result_types=int32_type())
            scf.condition(arith.cmpi(arith.CmpIPredicate.ne, behind, int32(0)), [])
        with ir.InsertionPoint(loop.after.blocks.append()):
            scf.yield_([])
        ptx("fence.acquire.gpu;")
    wait_for_warpgroup()


ANY_BEHIND = """{
    .reg .pred behind;
    .reg .b32 found;
    ld.relaxed.gpu.global.b32 found, [$1];
    setp.lt.u32 behind, found, $2;
    vote.sync.any.pred behind, behind, 0xffffffff;
    selp.b32 $0, 1, 0, behind;
}"""
"""1 in all threads of a warp if one of them has found less than it waits for, else 0."""


def _warp_of_warpgroup():
    return arith.remui(utils.warp_idx(), int32(4))


def _semaphore(counters, index: int) -> utils.SemaphoreRef:
    return utils.SemaphoreRef(address_of(counters, index))


# Memory of other GPUs, by its address, which is an integer of 64 bits


def address_of_words(words, row, offset):
    """The address whose low and high half are in a row of an array, plus an offset in bytes."""
    i64, index = ir.IntegerType.get_signless(64), ir.IndexType.get()
    place = arith.index_cast(index, row)
    low, high = (
        arith.extui(i64, memref.load(words, [place, utils.c(half, index)])) for half in (0, 1)
    )
    base = arith.ori(low, arith.shli(high, utils.c(32, i64)))
    return arith.addi(base, arith.extsi(i64, offset))


def bytes_after(address, count: int):
    return arith.addi(address, utils.c(count, ir.IntegerType.get_signless(64)))


def thread_of_warpgroup(threads: int):
    return arith.remui(utils.thread_idx(), int32(threads))


def number_of(scalar):
    """The number that an array without axes holds."""
    return scalar.registers.item()


def one_more(number):
    return arith.addi(number, int32(1))


def is_below(number, limit: int):
    return arith.cmpi(arith.CmpIPredicate.ult, number, int32(limit))


def if_true(condition) -> Any:
    """For a `with` statement: only threads in which the condition is true run its body."""
    return utils.when(condition)


def store_flag(address, number) -> None:
    """Stores a number after all earlier stores of this thread, as any GPU sees them."""
    ptx("st.release.sys.global.b32 [$0], $1;", address, number)


def wait_for_flag(address, number, patience):
    """Waits until a flag is at least `number`, for at most `patience` microseconds. Returns true if
    the time ran out. If not, what was stored before the flag can be read. The flag and the number
    may overflow."""
    i64 = ir.IntegerType.get_signless(64)
    nanoseconds = arith.muli(arith.extui(i64, patience), utils.c(1000, i64))
    begun = utils.globaltimer()
    loop = scf.WhileOp([int32_type()], [int32(-1)])
    with ir.InsertionPoint(loop.before.blocks.append(int32_type())):
        found = ptx("ld.acquire.sys.global.b32 $0, [$1];", address, result_types=int32_type())
        ahead = arith.subi(found, number)
        waited = arith.subi(utils.globaltimer(), begun)
        behind = arith.cmpi(arith.CmpIPredicate.slt, ahead, int32(0))
        in_time = arith.cmpi(arith.CmpIPredicate.ult, waited, nanoseconds)
        scf.condition(arith.andi(behind, in_time), [ahead])
    again = loop.after.blocks.append(int32_type())
    with ir.InsertionPoint(again):
        scf.yield_(list(again.arguments))
    return arith.cmpi(arith.CmpIPredicate.slt, loop.results[0], int32(0))


def numbered(word, number):
    """A word and a number as one integer of 64 bits, which is stored and loaded as a whole."""
    i64 = ir.IntegerType.get_signless(64)
    high = arith.shli(arith.extui(i64, number), utils.c(32, i64))
    return arith.ori(arith.extui(i64, word), high)


def wait_for_numbered(address, number, patience) -> tuple[list, Any]:
    """Waits until two words beside each other both have this number, for at most `patience`
    microseconds. Returns the words, and whether the time ran out."""
    i32, i64 = int32_type(), ir.IntegerType.get_signless(64)
    nanoseconds = arith.muli(arith.extui(i64, patience), utils.c(1000, i64))
    begun = utils.globaltimer()
    loop = scf.WhileOp([i32, i32, ir.IntegerType.get_signless(1)], [])
    with ir.InsertionPoint(loop.before.blocks.append()):
        load = "ld.relaxed.sys.global.v2.b64 {$0, $1}, [$2];"
        cells = ptx(load, address, result_types=[i64, i64])
        others = [
            arith.cmpi(arith.CmpIPredicate.ne, arith.trunci(i32, _high(cell)), number)
            for cell in cells
        ]
        missing = arith.ori(*others)
        waited = arith.subi(utils.globaltimer(), begun)
        in_time = arith.cmpi(arith.CmpIPredicate.ult, waited, nanoseconds)
        words = [arith.trunci(i32, cell) for cell in cells]
        scf.condition(arith.andi(missing, in_time), [*words, missing])
    with ir.InsertionPoint(loop.after.blocks.append(*[result.type for result in loop.results])):
        scf.yield_([])
    *words, missing = loop.results
    return words, missing


def _high(cell):
    return arith.shrui(cell, utils.c(32, ir.IntegerType.get_signless(64)))


def chosen(condition, if_so, otherwise):
    return arith.select(condition, if_so, otherwise)


# Registers


def words_of(array: mgpu.FragmentedArray) -> list:
    """What this thread holds of an array, as integers of 32 bits."""
    words = []
    for register in array.registers.flat:
        vector_type = ir.VectorType(register.type)
        count = math.prod(vector_type.shape) * utils.bitwidth(vector_type.element_type) // 32
        found = vector.bitcast(ir.VectorType.get((count,), int32_type()), register)
        words += [vector.extract(found, [], [i]) for i in range(count)]
    return words


def array_of_words(words: list, shape: tuple[int, ...], dtype, layout) -> mgpu.FragmentedArray:
    """An array of floats made from what this thread holds of it."""
    layout = layout.to_mgpu()
    register_type = layout.registers_element_type(utils.dtype_to_ir_type(dtype))
    registers = np.empty(layout.registers_shape(shape), dtype=object)
    count = len(words) // registers.size
    of_words = ir.VectorType.get((count,), int32_type())
    for i in range(registers.size):
        own = vector.from_elements(of_words, words[i * count : (i + 1) * count])
        registers.flat[i] = vector.bitcast(register_type, own)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def floats_of(array: mgpu.FragmentedArray) -> list:
    """The floats of an array that this thread holds."""
    return [
        vector.extract(register, [], [i])
        for register in array.registers.flat
        for i in range(math.prod(ir.VectorType(register.type).shape))
    ]


def array_of(floats: list, shape: tuple[int, ...], layout) -> tuple[mgpu.FragmentedArray, int]:
    """An array made from the first of this thread's floats, and the number of floats it took."""
    layout = layout.to_mgpu()
    register_type = layout.registers_element_type(ir.F32Type.get())
    width = math.prod(ir.VectorType(register_type).shape)
    registers = np.empty(layout.registers_shape(shape), dtype=object)
    for i in range(registers.size):
        registers.flat[i] = vector.from_elements(register_type, floats[i * width : (i + 1) * width])
    array = mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)
    return array, registers.size * width


def array_of_pairs(pairs: list, shape: tuple[int, ...], layout) -> mgpu.FragmentedArray:
    """An array of bfloat16 made from this thread's pairs of them, as integers of 32 bits."""
    pair_type = ir.VectorType.get((2,), ir.BF16Type.get())
    layout = layout.to_mgpu()
    registers = np.empty(layout.registers_shape(shape), dtype=object)
    assert registers.size == len(pairs), f"{len(pairs)} pairs, expected {registers.size}"
    for i, pair in enumerate(pairs):
        one = vector.from_elements(ir.VectorType.get((1,), int32_type()), [pair])
        registers.flat[i] = vector.bitcast(pair_type, one)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def int32_type() -> Any:
    return ir.IntegerType.get_signless(32)
