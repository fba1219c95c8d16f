"""Where all thread blocks of a GPU wait for each other: counters in global memory.

Every call adds its arrivals to what earlier calls left, so that nobody has to set the counters to
zero between calls.
"""

from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref


def arrive(counters, place: int) -> None:
    """Says that all of this warpgroup's stores are done."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def signal(_, counters) -> None:
        utils.warpgroup_barrier()
        counter(counters, place).signal(1, memory_scope="gpu")

    signal(counters)


def wait(counters, place: int, calls, everyone: int) -> None:
    """Until `everyone` has arrived as often as there have been `calls`, this one included."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def until_all(_, counters, calls) -> None:
        index, number = ir.IndexType.get(), ir.IntegerType.get_signless(32)
        turns = memref.load(calls, [utils.c(0, index)])
        counter(counters, place).wait(
            arith.muli(turns, utils.c(everyone, number)), decrement=False, memory_scope="gpu"
        )

    until_all(counters, calls)


def counter(counters, place: int) -> utils.SemaphoreRef:
    return utils.SemaphoreRef(utils.memref_ptr(utils.memref_slice(counters, place)))
