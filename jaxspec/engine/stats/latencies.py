"""Latencies of requests, as histograms: unlike percentiles, they can be summed."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxspec.engine.stats.acceptance import RequestStats
from jaxspec.short_repr import figures

BOUNDS_OF_VLLM = {
    "time_to_first_token": (
        0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
        1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
    ),
    "inter_token_latency": (
        0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
        1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    ),
    "e2e_request_latency": (
        0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0,
        40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
    ),
}  # fmt: skip
"""The bounds that vLLM's metrics have, in seconds."""
BELOW = (0.0005, 0.002, 0.015)
"""Further bounds, for steps that are shorter than those that vLLM's bounds can tell apart."""
BOUNDS = tuple(sorted({*BELOW, *(one for some in BOUNDS_OF_VLLM.values() for one in some)}))
"""Bounds in seconds of every histogram. All of vLLM's are among them, so that dashboards made for
vLLM's buckets work."""


@dataclasses.dataclass(frozen=True, repr=False)
class Histogram:
    """A histogram of durations."""

    counts: tuple[int, ...] = (0,) * (len(BOUNDS) + 1)
    """Number of durations between the bound before and each of `BOUNDS`; last, the number above all
    bounds."""
    seconds: float = 0.0
    """Sum of the durations."""

    @property
    def count(self) -> int:
        """Number of durations."""
        return sum(self.counts)

    @property
    def mean_s(self) -> float:
        """Mean of the durations; 0 if there are none."""
        return self.seconds / max(self.count, 1)

    def __repr__(self) -> str:
        return figures(self, count=self.count, mean_s=self.mean_s)


@dataclasses.dataclass(frozen=True)
class Latencies:
    """Latencies of the finished requests that emitted a token, as `RequestStats` defines them."""

    queue_s: Histogram = Histogram()
    ttft_s: Histogram = Histogram()
    itl_s: Histogram = Histogram()
    tpot_s: Histogram = Histogram()
    """Only for requests with more than one token."""
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
    counts = np.bincount(np.searchsorted(BOUNDS, durations), minlength=len(BOUNDS) + 1)
    return Histogram(
        counts=tuple(before + new for before, new in zip(histogram.counts, counts.tolist())),
        seconds=histogram.seconds + sum(durations),
    )
