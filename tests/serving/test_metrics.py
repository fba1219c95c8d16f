"""What Prometheus reads from the server is what the engine says of itself."""

import httpx
from prometheus_client.parser import text_string_to_metric_families
from running_server import MODEL

from jaxspec.engine.stats.latencies import BOUNDS, BOUNDS_OF_VLLM
from jaxspec.serving.options import METRICS_PREFIX


def samples(server) -> dict:
    answer = httpx.get(f"{server.url}/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = text_string_to_metric_families(answer.text)
    found = {}
    for sample in (sample for family in families for sample in family.samples):
        labels = dict(sample.labels)
        assert labels.pop("model_name") == MODEL
        found[sample.name.removeprefix(METRICS_PREFIX), *labels.values()] = sample.value
    return found


def test_the_numbers_of_the_engine(server):
    server.complete("def parse(", max_tokens=9)
    server.complete("class A:", max_tokens=24, stop=["e"])
    server.post("/v1/completions", {"prompt": "a", "max_tokens": 1000})
    found, stats = samples(server), server.engine.stats()
    finished, latencies = stats.finished, stats.latencies
    expected = {
        "num_requests_running": stats.running,
        "num_requests_waiting": stats.waiting,
        "kv_cache_usage_perc": stats.pages_in_use / stats.pages_total,
        "prompt_tokens_total": finished.prompt_tokens,
        "generation_tokens_total": finished.generation_tokens,
        "spec_decode_num_drafts_total": finished.num_spec_steps,
        "spec_decode_num_draft_tokens_total": finished.num_draft_tokens,
        "spec_decode_num_accepted_tokens_total": finished.num_accepted_draft_tokens,
        "prefix_cache_queries_total": stats.prefix_cache_queries,
        "prefix_cache_hits_total": stats.prefix_cache_hits,
        "admission_rejections_total": server.service.counts.rejections,
        "time_to_first_token_seconds_count": latencies.ttft_s.count,
        "time_to_first_token_seconds_sum": latencies.ttft_s.seconds,
        "inter_token_latency_seconds_count": latencies.itl_s.count,
        "e2e_request_latency_seconds_count": latencies.total_s.count,
        "request_queue_time_seconds_count": latencies.queue_s.count,
    }
    assert {name: found[name,] for name in expected} == expected
    for place, count in enumerate(finished.accepted_per_position):
        name = "spec_decode_num_accepted_tokens_per_pos_total"
        assert found[name, str(place)] == count
    for reason, count in server.service.counts.ended.items():
        assert found["request_success_total", reason] == count
    ended = server.service.counts.ended
    assert ended["stop"] >= 1 and ended["length"] >= 1


def test_what_routers_read(server):
    """The names that llm-d's router has built in for vLLM, and the labels of the cache."""
    text = httpx.get(f"{server.url}/metrics").text
    [info] = [line for line in text.splitlines() if line.startswith("vllm:cache_config_info{")]
    total = server.engine.total_pages
    for label in (f'num_gpu_blocks="{total}"', 'block_size="16"', 'enable_prefix_caching="True"'):
        assert label in info
    for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"):
        assert f"\nvllm:{name}{{" in text


def test_every_bound_of_vllm_is_a_bound():
    assert all(set(bounds) <= set(BOUNDS) for bounds in BOUNDS_OF_VLLM.values())
