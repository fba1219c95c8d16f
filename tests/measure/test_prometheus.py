"""The snapshot in Prometheus' own words."""

import dataclasses
import sys

import pytest

from jaxspec.engine.stats import EngineStats, PooledStats
from jaxspec.errors import LoadError
from jaxspec.measure.prometheus import exposition

FINISHED = PooledStats(
    num_spec_steps=4,
    drafted_per_position=(4, 4),
    reached_per_position=(4, 3),
    accepted_per_position=(3, 1),
    num_requests=2,
    generation_tokens=9,
)
STATS = EngineStats(1, 2, 3, 12, None, FINISHED)


def test_what_it_says():
    pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    text = exposition(STATS)
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    found = {(s.name, s.labels.get("position")): s.value for s in samples}
    assert found["jaxspec:num_requests_waiting", None] == 1
    assert found["jaxspec:num_requests_running", None] == 2
    assert found["jaxspec:kv_cache_usage_perc", None] == 0.25
    assert found["jaxspec:spec_decode_num_drafts_total", None] == 4
    assert found["jaxspec:spec_decode_num_accepted_tokens_total", None] == 4
    assert found["jaxspec:spec_decode_num_accepted_tokens_per_pos_total", "1"] == 1
    assert found["jaxspec:synthetic_acceptance", None] == 0
    assert not any("peak_memory" in name for name, _ in found), "the CPU does not say"


def test_a_drawn_acceptance_is_marked():
    pytest.importorskip("prometheus_client")
    drawn = dataclasses.replace(STATS, finished=dataclasses.replace(FINISHED, synthetic=True))
    assert "jaxspec:synthetic_acceptance 1.0" in exposition(drawn).splitlines()


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(LoadError, match=r"jaxspec-decode\[metrics\]"):
        exposition(STATS)
