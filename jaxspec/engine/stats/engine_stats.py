"""A snapshot of an engine: its load, its memory, and the statistics of finished requests."""

import dataclasses

from jaxspec.engine.stats.acceptance import PooledStats
from jaxspec.engine.stats.latencies import Latencies
from jaxspec.models.kernels import KernelUse
from jaxspec.short_repr import figures


@dataclasses.dataclass(frozen=True, repr=False)
class EngineStats:
    """The load of an engine at one moment, and the requests that it has finished so far."""

    waiting: int
    """Requests without a slot."""
    running: int
    """Requests with a slot."""
    pages_in_use: int
    pages_total: int
    peak_memory_bytes: int | None
    """Most memory of the device that this process used; None if the backend does not report it."""
    finished: PooledStats
    latencies: Latencies
    """Latencies of the finished requests."""
    kernels: tuple[KernelUse, ...] = ()
    """For each op of the models, what runs it and, if that is no kernel, the reason."""
    prefix_cache_queries: int = 0
    """Prompt tokens that were looked up in the prefix cache."""
    prefix_cache_hits: int = 0
    """How many of these were found."""

    def __repr__(self) -> str:
        return figures(
            self,
            waiting=self.waiting,
            running=self.running,
            pages_in_use=self.pages_in_use,
            pages_total=self.pages_total,
            finished=self.finished,
            ttft_s=self.latencies.ttft_s,
            itl_s=self.latencies.itl_s,
        )
