"""How long requests took, as histograms, which add up where percentiles do not."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxspec.engine.stats.acceptance import RequestStats

BOUNDS = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5,
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0,
)  # fmt: skip
"""Seconds; from a small model's step to a long reply that had to wait."""


@dataclasses.dataclass(frozen=True)
class Histogram:
    """Durations."""

    counts: tuple[int, ...] = (0,) * (len(BOUNDS) + 1)
    """How many were at most as long as each of `BOUNDS` and longer than the bound before it; at
    the end, how many were longer than all."""
    seconds: float = 0.0
    """Their sum."""


@dataclasses.dataclass(frozen=True)
class Latencies:
    """Of the requests that ended and gave a token; see `RequestStats` for what each is."""

    queue_s: Histogram = Histogram()
    ttft_s: Histogram = Histogram()
    itl_s: Histogram = Histogram()
    tpot_s: Histogram = Histogram()
    """Of requests with more than one token."""
    total_s: Histogram = Histogram()
    """From submission to the last token."""


def with_request(latencies: Latencies, stats: RequestStats) -> Latencies:
    if stats.generation_tokens == 0:
        return latencies
    return Latencies(
        queue_s=_with(latencies.queue_s, [stats.queue_s]),
        ttft_s=_with(latencies.ttft_s, [stats.ttft_s]),
        itl_s=_with(latencies.itl_s, stats.itl_s),
        tpot_s=_with(latencies.tpot_s, [stats.tpot_s] if stats.generation_tokens > 1 else []),
        total_s=_with(latencies.total_s, [stats.ttft_s + stats.decode_s]),
    )


def _with(histogram: Histogram, durations: Sequence[float]) -> Histogram:
    found = np.bincount(np.searchsorted(BOUNDS, durations), minlength=len(BOUNDS) + 1)
    return Histogram(
        counts=tuple(had + more for had, more in zip(histogram.counts, found.tolist())),
        seconds=histogram.seconds + sum(durations),
    )
