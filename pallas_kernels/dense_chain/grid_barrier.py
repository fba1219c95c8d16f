"""Barriers of all thread blocks of the grid: counters in global memory.

Each call of the kernel adds its arrivals to those of earlier calls, so no counter has to be reset
between calls.
"""

from pallas_kernels import jax_internals as internals
from pallas_kernels.jax_internals import inline_mgpu, plgpu


def arrive(counters, barrier: int) -> None:
    """Signals that all stores of this warpgroup are done."""

    @inline_mgpu(arg_types=(plgpu.RefType(),))
    def signal(_, counters) -> None:
        internals.wait_for_warpgroup()
        internals.signal_counter(counters, barrier)

    signal(counters)


def wait(counters, barrier: int, calls, arrivals: int) -> None:
    """Waits until the counter reaches `arrivals` times the number of calls, including this one."""

    @inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def wait_for_all(_, counters, calls) -> None:
        internals.wait_for_counter(counters, barrier, calls, arrivals)

    wait_for_all(counters, calls)
