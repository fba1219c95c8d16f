"""Barriers of all thread blocks of the grid: counters in global memory.

Each call of the kernel adds its arrivals to those of earlier calls, so no counter has to be reset
between calls.
"""

from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref

from pallas_kernels.tiles import inline_mgpu


def arrive(counters, barrier: int) -> None:
    """Signals that all stores of this warpgroup are done."""

    @inline_mgpu(arg_types=(plgpu.RefType(),))
    def signal(_, counters) -> None:
        utils.warpgroup_barrier()
        counter(counters, barrier).signal(1, memory_scope="gpu")

    signal(counters)


def wait(counters, barrier: int, calls, arrivals: int) -> None:
    """Waits until the counter reaches `arrivals` for each of `calls`, which include this one."""

    @inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def wait_for_all(_, counters, calls) -> None:
        index, number = ir.IndexType.get(), ir.IntegerType.get_signless(32)
        call_count = memref.load(calls, [utils.c(0, index)])
        counter(counters, barrier).wait(
            arith.muli(call_count, utils.c(arrivals, number)), decrement=False, memory_scope="gpu"
        )

    wait_for_all(counters, calls)


def counter(counters, barrier: int) -> utils.SemaphoreRef:
    return utils.SemaphoreRef(utils.memref_ptr(utils.memref_slice(counters, barrier)))
