"""The time that a request is told does not count the compiling of programs."""

import time

import pytest
from golden_pair import budget, golden_engine, trajectories

from jaxspec.engine.step import compiled
from jaxspec.engine.step.compiled import Programs
from jaxspec.engine.step.device import Clock

pytestmark = pytest.mark.usefixtures("compiles_anew")


def test_the_clock_stands_still_while_it_is_stopped(monkeypatch):
    seconds = iter([1.0, 2.0, 10.0, 11.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(seconds))
    clock = Clock()
    before = clock.now()
    with clock.stopped():
        assert clock.now() == clock.now() == 2.0
    assert (before, clock.now()) == (1.0, 3.0)


def test_an_error_starts_it_again(monkeypatch):
    seconds = iter([2.0, 10.0, 11.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(seconds))
    clock = Clock()
    with pytest.raises(KeyboardInterrupt), clock.stopped():
        raise KeyboardInterrupt
    assert clock.now() == 3.0


def test_no_latency_counts_the_time_of_compiling(monkeypatch):
    """Every program takes ten minutes more to make."""
    late, real, make = [0.0], time.perf_counter, Programs.make

    def slowly(self, program):
        late[0] += 600.0
        return make(self, program)

    monkeypatch.setattr(compiled, "_SHARED", {})
    engine = golden_engine(cache_dir=False)
    monkeypatch.setattr(Programs, "make", slowly)
    monkeypatch.setattr(time, "perf_counter", lambda: real() + late[0])
    prompts = [case["prompt"] for case in trajectories()[:6]]
    outputs = engine.generate(prompts, budget(4))
    assert late[0] >= 2 * 600.0
    for output in outputs:
        stats = output.stats
        for seconds in (stats.queue_s, stats.ttft_s, stats.decode_s, *stats.itl_s):
            assert 0 <= seconds < 500
