"""The engine's snapshot as Prometheus text."""

import dataclasses
import functools
import sys

import pytest

from jaxspec.engine.stats.acceptance import PooledStats, RequestStats
from jaxspec.engine.stats.engine_stats import EngineStats
from jaxspec.engine.stats.latencies import Latencies, with_request
from jaxspec.engine.stats.prometheus import ServedMetrics, exposition
from jaxspec.errors import LoadError

FINISHED = PooledStats(
    num_spec_steps=4,
    drafted_per_position=(4, 4),
    reached_per_position=(4, 3),
    accepted_per_position=(3, 1),
    num_requests=2,
    generation_tokens=9,
)
STATS = EngineStats(
    1, 2, 3, 12, None, FINISHED, Latencies(), prefix_cache_queries=30, prefix_cache_hits=16
)


def test_counters_and_gauges():
    pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    text = exposition(STATS)
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    values_by_name = {(s.name, s.labels.get("position")): s.value for s in samples}
    assert values_by_name["vllm:num_requests_waiting", None] == 1
    assert values_by_name["vllm:num_requests_running", None] == 2
    assert values_by_name["vllm:kv_cache_usage_perc", None] == 0.25
    assert values_by_name["vllm:spec_decode_num_drafts_total", None] == 4
    assert values_by_name["vllm:spec_decode_num_accepted_tokens_total", None] == 4
    assert values_by_name["vllm:spec_decode_num_accepted_tokens_per_pos_total", "1"] == 1
    assert values_by_name["vllm:synthetic_acceptance", None] == 0
    assert values_by_name["vllm:prefix_cache_queries_total", None] == 30
    assert values_by_name["vllm:prefix_cache_hits_total", None] == 16
    assert not any("peak_memory" in name for name, _ in values_by_name), (
        "the CPU does not report it"
    )


REQUESTS = (
    # Tokens after 0.75 s, then 0.5, 0.25 and 0.25 s later: five, two of them in one result.
    RequestStats(
        prompt_tokens=3, generation_tokens=5, queue_s=0.5, ttft_s=0.75, decode_s=1.0,
        itl_s=(0.5, 0.25, 0.25),
    ),
    RequestStats(prompt_tokens=3, generation_tokens=1, queue_s=0.0, ttft_s=4000.0),
    RequestStats(prompt_tokens=3, generation_tokens=0, queue_s=7.0),
)  # fmt: skip


@pytest.fixture(scope="module")
def histograms():
    pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    latencies = functools.reduce(with_request, REQUESTS, Latencies())
    text = exposition(dataclasses.replace(STATS, latencies=latencies))
    return {f.name: f for f in text_string_to_metric_families(text) if f.type == "histogram"}


def values(family, suffix):
    return [s.value for s in family.samples if s.name == f"{family.name}_{suffix}"]


@pytest.mark.parametrize(
    ("name", "up_to", "count", "total"),
    [
        ("time_to_first_token", {0.5: 0, 1: 1, 640: 1}, 2, 4000.75),
        ("inter_token_latency", {0.2: 0, 0.5: 3}, 3, 1.0),
        ("request_time_per_output_token", {0.2: 0, 0.5: 1}, 1, 0.25),
        ("e2e_request_latency", {1: 0, 2: 1, 640: 1}, 2, 4001.75),
        ("request_queue_time", {0.0005: 1, 0.2: 1, 0.5: 2}, 2, 0.5),
    ],
)
def test_latencies_counted_by_hand(histograms, name, up_to, count, total):
    family = histograms[f"vllm:{name}_seconds"]
    bounds = [float(s.labels["le"]) for s in family.samples if "le" in s.labels]
    below = dict(zip(bounds, values(family, "bucket"), strict=True))
    assert {bound: below[bound] for bound in up_to} == up_to
    assert below[float("inf")] == count and values(family, "count") == [count]
    assert values(family, "sum") == [total]


def test_latencies_are_histograms_as_prometheus_wants_them(histograms):
    assert len(histograms) == 5
    for family in histograms.values():
        bounds = [float(s.labels["le"]) for s in family.samples if "le" in s.labels]
        counts = values(family, "bucket")
        assert family.name.endswith("_seconds") and family.documentation.startswith("Seconds ")
        assert bounds == sorted(set(bounds)) and bounds[-1] == float("inf")
        assert counts == sorted(counts)


def test_a_drawn_acceptance_is_marked():
    pytest.importorskip("prometheus_client")
    drawn = dataclasses.replace(STATS, finished=dataclasses.replace(FINISHED, synthetic=True))
    assert "vllm:synthetic_acceptance 1.0" in exposition(drawn).splitlines()


def test_a_server_adds_labels_and_what_it_counts():
    pytest.importorskip("prometheus_client")
    served = ServedMetrics("own:", "m", 64, True, {"stop": 2}, 7)
    lines = exposition(STATS, served).splitlines()
    labels = 'block_size="64",enable_prefix_caching="True",model_name="m",num_gpu_blocks="12"'
    assert f"own:cache_config_info{{{labels}}} 1.0" in lines
    assert 'own:request_success_total{finished_reason="stop",model_name="m"} 2.0' in lines
    assert 'own:admission_rejections_total{model_name="m"} 7.0' in lines
    named = [line for line in lines if not line.startswith("#")]
    assert all(line.startswith("own:") and 'model_name="m"' in line for line in named)


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(LoadError, match=r"jaxspec-decode\[metrics\]"):
        exposition(STATS)
