"""An engine's snapshot as Prometheus text. Needs the extra `metrics`."""

import itertools
from collections.abc import Iterator
from typing import Any

from jaxspec.engine.stats.acceptance import PooledStats
from jaxspec.engine.stats.engine_stats import EngineStats
from jaxspec.engine.stats.latencies import BOUNDS, Histogram, Latencies
from jaxspec.errors import LoadError


def exposition(stats: EngineStats) -> str:
    """vLLM's metrics with our prefix. As in vLLM, `spec_decode_num_drafts` counts verify steps."""
    try:
        from prometheus_client import CollectorRegistry, generate_latest
    except ImportError as error:
        raise LoadError(
            "metrics need prometheus-client; install it with pip install 'jaxspec-decode[metrics]'"
        ) from error
    registry = CollectorRegistry()
    registry.register(_Snapshot(stats))
    return generate_latest(registry).decode()


class _Snapshot:
    """A collector in the form that prometheus-client expects."""

    def __init__(self, stats: EngineStats):
        self.stats = stats

    def collect(self) -> Iterator[Any]:
        yield from _gauges(self.stats)
        yield from _counters(self.stats.finished)
        yield _accepted_per_position(self.stats.finished)
        yield from _latencies(self.stats.latencies)


def _gauges(stats: EngineStats) -> Iterator[Any]:
    from prometheus_client.core import GaugeMetricFamily

    used = stats.pages_in_use / stats.pages_total if stats.pages_total else 0.0
    synthetic = float(stats.finished.synthetic)
    gauges = (
        ("num_requests_running", "Requests with a slot", stats.running),
        ("num_requests_waiting", "Requests without a slot", stats.waiting),
        ("kv_cache_usage_perc", "Share of pages in use, 1 is all", used),
        ("synthetic_acceptance", "1: drafts were not compared", synthetic),
        ("peak_memory_bytes", "Most memory of the device in use", stats.peak_memory_bytes),
    )
    for name, text, value in gauges:
        if value is not None:
            yield GaugeMetricFamily(f"jaxspec:{name}", text, value)


def _counters(finished: PooledStats) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily

    accepted = finished.num_accepted_draft_tokens
    counters = (
        ("request", "Requests that ended", finished.num_requests),
        ("prompt_tokens", "Prompt tokens of ended requests", finished.prompt_tokens),
        ("generation_tokens", "Emitted tokens of ended requests", finished.generation_tokens),
        ("spec_decode_num_drafts", "Verify steps of ended requests", finished.num_spec_steps),
        ("spec_decode_num_draft_tokens", "Drafts verified", finished.num_draft_tokens),
        ("spec_decode_num_accepted_tokens", "Drafts accepted", accepted),
    )
    for name, text, value in counters:
        yield CounterMetricFamily(f"jaxspec:{name}", text, value)


def _accepted_per_position(finished: PooledStats) -> Any:
    from prometheus_client.core import CounterMetricFamily

    family = CounterMetricFamily(
        "jaxspec:spec_decode_num_accepted_tokens_per_pos",
        "Verify steps that accepted the draft at this place, 0 first",
        labels=["position"],
    )
    for place, count in enumerate(finished.accepted_per_position):
        family.add_metric([str(place)], count)
    return family


def _latencies(latencies: Latencies) -> Iterator[Any]:
    from prometheus_client.core import HistogramMetricFamily

    histograms = (
        ("time_to_first_token", "Seconds from submission to the first token", latencies.ttft_s),
        ("inter_token_latency", "Seconds between results with tokens in them", latencies.itl_s),
        ("request_time_per_output_token", "Seconds per token after the first", latencies.tpot_s),
        ("e2e_request_latency", "Seconds from submission to the last token", latencies.total_s),
        ("request_queue_time", "Seconds from submission to a slot", latencies.queue_s),
    )
    for name, text, histogram in histograms:
        buckets = _buckets(histogram)
        yield HistogramMetricFamily(f"jaxspec:{name}_seconds", text, buckets, histogram.seconds)


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Cumulative counts: Prometheus counts everything up to a bound, not between two bounds."""
    bounds = [*map(str, BOUNDS), "+Inf"]
    return list(zip(bounds, map(float, itertools.accumulate(histogram.counts))))
