"""Barriers for all thread blocks of a GPU: counters in global memory.

Every call adds its arrivals to those of earlier calls, so that no counter has to be set to zero
between calls.
"""

from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref

from pallas_kernels.tiles import inline_mgpu


def arrive(counters, barrier: int) -> None:
    """Announces that all stores of this warpgroup are done."""

    @inline_mgpu(arg_types=(plgpu.RefType(),))
    def signal(_, counters) -> None:
        utils.warpgroup_barrier()
        counter(counters, barrier).signal(1, memory_scope="gpu")

    signal(counters)


def wait(counters, barrier: int, calls, arrivals: int) -> None:
    """Until there are `arrivals` for each of `calls`, this call included."""

    @inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def until_all(_, counters, calls) -> None:
        index, number = ir.IndexType.get(), ir.IntegerType.get_signless(32)
        turns = memref.load(calls, [utils.c(0, index)])
        counter(counters, barrier).wait(
            arith.muli(turns, utils.c(arrivals, number)), decrement=False, memory_scope="gpu"
        )

    until_all(counters, calls)


def counter(counters, barrier: int) -> utils.SemaphoreRef:
    return utils.SemaphoreRef(utils.memref_ptr(utils.memref_slice(counters, barrier)))
