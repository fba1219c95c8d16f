"""An engine's snapshot as Prometheus text. Needs the extra `metrics`."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jaxspec.engine.stats.engine_stats import EngineStats
from jaxspec.engine.stats.latencies import BOUNDS, Histogram
from jaxspec.errors import LoadError


@dataclasses.dataclass(frozen=True)
class ServedMetrics:
    """What a server adds to the snapshot of its engine. The defaults are those of no server."""

    prefix: str = "vllm:"
    """What the names of metrics begin with. The default is vLLM's prefix, as the names are vLLM's,
    so that tools for vLLM's metrics can read these."""
    model_name: str | None = None
    """A label of every metric."""
    page_size: int | None = None
    """Positions per page of the caches."""
    prefix_caching: bool | None = None
    ended: Mapping[str, int] = MappingProxyType({})
    """Choices that ended, by their reason."""
    rejections: int | None = None
    """Requests that were refused because too many others waited."""


def exposition(stats: EngineStats, served: ServedMetrics | None = None) -> str:
    """The snapshot as vLLM's metrics. As in vLLM, `spec_decode_num_drafts` counts verify steps."""
    try:
        from prometheus_client import CollectorRegistry, generate_latest
    except ImportError as error:
        raise LoadError(
            "metrics need prometheus-client; install it with pip install 'jaxspec-decode[metrics]'"
        ) from error
    registry = CollectorRegistry()
    registry.register(_Snapshot(stats, served or ServedMetrics()))
    return generate_latest(registry).decode()


class _Snapshot:
    """A collector in the form that prometheus-client expects."""

    def __init__(self, stats: EngineStats, served: ServedMetrics):
        self.stats = stats
        self.served = served
        self.labels = {} if served.model_name is None else {"model_name": served.model_name}

    def collect(self) -> Iterator[Any]:
        yield from self._gauges()
        yield from self._cache_config()
        yield from self._counters()
        yield self._accepted_per_position()
        yield from self._ended()
        yield from self._latencies()

    def _family(self, kind: Any, name: str, text: str, labels: Sequence[str] = ()) -> Any:
        return kind(f"{self.served.prefix}{name}", text, labels=[*self.labels, *labels])

    def _values(self, *more: str) -> list[str]:
        """Values of the labels that every metric has, followed by `more`."""
        return [*self.labels.values(), *more]

    def _gauges(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

        stats = self.stats
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
                family = self._family(GaugeMetricFamily, name, text)
                family.add_metric(self._values(), value)
                yield family

    def _cache_config(self) -> Iterator[Any]:
        """The sizes of the cache as labels, from which routers compute what fits into it."""
        from prometheus_client.core import GaugeMetricFamily

        if self.served.page_size is None:
            return
        labels = {
            "block_size": str(self.served.page_size),
            "num_gpu_blocks": str(self.stats.pages_total),
            "enable_prefix_caching": str(self.served.prefix_caching),
        }
        text = "Pages of the cache and their size"
        family = self._family(GaugeMetricFamily, "cache_config_info", text, [*labels])
        family.add_metric(self._values(*labels.values()), 1)
        yield family

    def _counters(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily

        finished, stats = self.stats.finished, self.stats
        accepted = finished.num_accepted_draft_tokens
        counters = (
            ("request", "Requests that ended", finished.num_requests),
            ("prompt_tokens", "Prompt tokens of ended requests", finished.prompt_tokens),
            ("generation_tokens", "Emitted tokens of ended requests", finished.generation_tokens),
            ("spec_decode_num_drafts", "Verify steps of ended requests", finished.num_spec_steps),
            ("spec_decode_num_draft_tokens", "Drafts verified", finished.num_draft_tokens),
            ("spec_decode_num_accepted_tokens", "Drafts accepted", accepted),
            ("prefix_cache_queries", "Prompt tokens looked up", stats.prefix_cache_queries),
            ("prefix_cache_hits", "Prompt tokens found in the cache", stats.prefix_cache_hits),
            ("admission_rejections", "Requests refused under load", self.served.rejections),
        )
        for name, text, value in counters:
            if value is not None:
                family = self._family(CounterMetricFamily, name, text)
                family.add_metric(self._values(), value)
                yield family

    def _accepted_per_position(self) -> Any:
        from prometheus_client.core import CounterMetricFamily

        name = "spec_decode_num_accepted_tokens_per_pos"
        text = "Verify steps that accepted the draft at this place, 0 first"
        family = self._family(CounterMetricFamily, name, text, ["position"])
        for place, count in enumerate(self.stats.finished.accepted_per_position):
            family.add_metric(self._values(str(place)), count)
        return family

    def _ended(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily

        if not self.served.ended:
            return
        text = "Choices that ended, by reason"
        family = self._family(CounterMetricFamily, "request_success", text, ["finished_reason"])
        for reason, count in sorted(self.served.ended.items()):
            family.add_metric(self._values(reason), count)
        yield family

    def _latencies(self) -> Iterator[Any]:
        from prometheus_client.core import HistogramMetricFamily

        all_of = self.stats.latencies
        histograms = (
            ("time_to_first_token", "Seconds from submission to the first token", all_of.ttft_s),
            ("inter_token_latency", "Seconds between results with tokens in them", all_of.itl_s),
            ("request_time_per_output_token", "Seconds per token after the first", all_of.tpot_s),
            ("e2e_request_latency", "Seconds from submission to the last token", all_of.total_s),
            ("request_queue_time", "Seconds from submission to a slot", all_of.queue_s),
        )
        for name, text, histogram in histograms:
            family = self._family(HistogramMetricFamily, f"{name}_seconds", text)
            family.add_metric(self._values(), _buckets(histogram), histogram.seconds)
            yield family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Cumulative counts: Prometheus counts everything up to a bound, not between two bounds."""
    bounds = [*map(str, BOUNDS), "+Inf"]
    return list(zip(bounds, map(float, itertools.accumulate(histogram.counts))))
