"""What an engine says of itself."""

import dataclasses

from jaxspec.engine.stats.acceptance import PooledStats
from jaxspec.engine.stats.latencies import Latencies


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """An engine at one moment, and all that it has finished."""

    waiting: int
    """Requests without a slot."""
    running: int
    """Requests with one."""
    pages_in_use: int
    pages_total: int
    peak_memory_bytes: int | None
    """Of the device, in this process; None where the backend does not say."""
    finished: PooledStats
    latencies: Latencies
    """Of the finished requests."""
