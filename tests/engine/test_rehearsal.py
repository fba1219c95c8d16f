"""On a GPU `warm_up` also runs every program, and nothing is left behind by it."""

import collections

import pytest
from golden_pair import budget, check_golden, golden_engine, trajectories
from watching import watch

from jaxspec.engine import engine as room
from jaxspec.engine.adapt.width import AdaptiveWidth
from jaxspec.engine.step.compiled import program_key
from jaxspec.engine.step.observer import StepObserver

SIZES = {
    "widths": dict(driver="overlapped", adaptive=True, batch_sizes=(4,)),
    "lockstep": dict(driver="lockstep"),
    "drafts of the host": dict(method="dflash+ngram"),
}


class Ran(StepObserver):
    """How often each program ran."""

    def __init__(self) -> None:
        self.programs = collections.Counter()

    def program(self, step, inputs, static) -> None:
        self.programs[program_key(step, inputs, static)] += 1


@pytest.fixture
def slow_at_first(monkeypatch):
    monkeypatch.setattr(room, "first_runs_are_slow", lambda: True)


@pytest.mark.parametrize("options", SIZES.values(), ids=SIZES)
def test_every_program_runs_twice_and_then_requests_get_their_tokens(
    slow_at_first, options, monkeypatch
):
    monkeypatch.setattr(AdaptiveWidth, "width", lambda self, batch, requests: 4)  # at any speed
    engine, cases = golden_engine(**options), trajectories()[:4]
    ran = Ran()
    with engine.observe(ran):
        engine.warm_up()
    programs = {program.key for program in engine.programs(False, only_needed=True)}
    assert ran.programs.keys() == programs and min(ran.programs.values()) >= 2
    assert engine.free_pages == engine.total_pages
    outputs = engine.generate([case["prompt"] for case in cases], budget(40))
    for output, case in zip(outputs, cases, strict=True):
        assert list(output.token_ids) == case["dflash_tokens"][:40]
        assert output.stats.mean_acceptance_length > 1.5


def test_an_engine_with_requests_runs_nothing_else(slow_at_first):
    engine, case = golden_engine(), trajectories()[0]
    id = engine.submit(case["prompt"], budget(40))
    engine.step([id])
    watcher = watch(engine)
    assert engine.warm_up() > 0 and watcher.ran == []
    [output] = [event.output for _ in range(40) for event in engine.step([id]) if event.output]
    check_golden(output, case, 40)


def test_on_a_cpu_and_for_the_first_steps_nothing_runs(monkeypatch):
    engine = golden_engine()
    watcher = watch(engine)
    engine.warm_up()
    monkeypatch.setattr(room, "first_runs_are_slow", lambda: True)
    engine.warm_up([trajectories()[0]["prompt"]], budget(9))
    assert watcher.ran == []
