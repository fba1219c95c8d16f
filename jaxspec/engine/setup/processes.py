"""Engines of several processes, on one host or on several, that run the same steps together.

Every process runs the same loop over the same requests and so takes the same decisions. What a
process measures for itself, its free memory and the time of its steps, is agreed upon first.
"""

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxspec.engine.adapt.loop_costs import Costs

MIB = 2**20
"""jax exchanges integers of 32 bits."""


def join_processes(coordinator: str, num_processes: int, process_id: int, dead_after: int) -> None:
    """Makes this process one of several, and waits until all have started. To be called before jax
    is used. If one ends or does not answer for `dead_after` seconds, the others end as well."""
    jax.distributed.initialize(
        coordinator,
        num_processes,
        process_id,
        heartbeat_timeout_seconds=dead_after,
        shutdown_timeout_seconds=dead_after,
    )


def least_of_processes(num_bytes: int) -> int:
    """The smallest number that any process found, in whole MiB."""
    if jax.process_count() == 1:
        return num_bytes
    of_all = multihost_utils.process_allgather(np.int32(num_bytes // MIB))
    return int(of_all.min()) * MIB


def as_first_process(costs: Costs) -> Costs:
    """The times that the first process measured, so that all processes choose the same widths."""
    if jax.process_count() == 1:
        return costs
    own = np.array(list(costs.values()), np.float32)
    agreed = multihost_utils.broadcast_one_to_all(own)
    return dict(zip(costs, map(float, agreed)))
