"""The engine's snapshot, while requests run and afterwards."""

import pathlib

import pytest

from jaxspec.engine.engine import Engine
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.engine.stats.acceptance import pool
from jaxspec.engine.stats.latencies import BOUNDS

PAIR = pathlib.Path(__file__).parents[1] / "data" / "goldens" / "a"


def test_a_snapshot_while_they_run_and_after():
    engine = Engine.from_pretrained(
        PAIR / "target", PAIR / "draft", dtype="float32", max_batch=1, max_model_len=64,
        page_size=16, prefill_chunk=16,
    )  # fmt: skip
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    live, outputs = {engine.submit([1, 2, 3], params), engine.submit([4], params)}, {}
    stats = engine.stats()
    assert (stats.waiting, stats.running) == (2, 0)
    while live:
        for event in engine.step(live):
            if event.output is not None:
                outputs[event.index] = event.output
                live.discard(event.index)
        stats = engine.stats()
        assert stats.waiting + stats.running + stats.finished.num_requests == 2
        assert (stats.pages_in_use > 0) == (stats.running > 0)
    assert stats.finished == pool(output.stats for output in outputs.values())
    assert stats.finished.generation_tokens == 18 and stats.pages_in_use == 0
    waited = stats.latencies.ttft_s
    assert len(waited.counts) == len(BOUNDS) + 1 and sum(waited.counts) == 2
    assert waited.seconds == pytest.approx(sum(o.stats.ttft_s for o in outputs.values()))
    assert sum(stats.latencies.itl_s.counts) == sum(len(o.stats.itl_s) for o in outputs.values())
    first, second = (outputs[id].stats for id in sorted(outputs))
    assert second.queue_s >= first.ttft_s > first.queue_s >= 0, "one slot: the second waits"
    assert second.ttft_s > second.queue_s and len(first.itl_s) == first.num_spec_steps
