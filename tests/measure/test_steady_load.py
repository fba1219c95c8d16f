"""Which steps of a pass are timed, and in which order contenders take turns."""

import dataclasses
from types import SimpleNamespace

import pytest

from jaxspec.engine.engine import Engine
from jaxspec.engine.requests.output import RequestOutput
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.engine.stats.acceptance import RequestStats
from jaxspec.measure import load
from jaxspec.measure.bench import Contender, _turns
from jaxspec.measure.load import Load, Schedule, Work, run_load


@dataclasses.dataclass
class Moment:
    """What the engine is doing when a step is asked for, and how long that step takes."""

    waiting: int
    running: int
    decoding: int
    seconds: float


class ScriptedEngine(Engine):
    """Goes through moments, whatever is submitted, and ends every request in the last of them."""

    def __init__(self, moments: list[Moment], clock: "Clock"):
        self.moments, self.clock, self.at, self.submitted = moments, clock, 0, 0

    num_waiting = property(lambda self: self.moments[self.at].waiting)
    num_running = property(lambda self: self.moments[self.at].running)
    num_decoding = property(lambda self: self.moments[self.at].decoding)

    def submit(self, prompt, params) -> int:
        self.submitted += 1
        return self.submitted

    def step(self, ids):
        self.clock.now += self.moments[self.at].seconds
        self.at += 1
        if self.at < len(self.moments):
            return []
        self.at -= 1
        return [SimpleNamespace(index=id, token_ids=(), output=ENDED) for id in sorted(ids)]


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


ENDED = RequestOutput(
    (1,), (2,), "", "length", None, None, RequestStats(prompt_tokens=1, generation_tokens=1)
)
PREFILLING = Moment(waiting=0, running=2, decoding=1, seconds=100.0)
WAITING = Moment(waiting=1, running=2, decoding=2, seconds=200.0)
ALONE = Moment(waiting=0, running=1, decoding=1, seconds=300.0)


def decoding(seconds: float) -> Moment:
    return Moment(waiting=0, running=2, decoding=2, seconds=seconds)


@pytest.fixture
def times_of(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(load, "time", clock)

    def times(*moments: Moment) -> tuple[float, ...]:
        work = [Work((1,), SamplingParams(4))] * 2
        return run_load(ScriptedEngine(list(moments), clock), work, Load(2)).step_s

    return times


def test_a_step_counts_if_every_slot_decodes_in_it_and_decoded_in_the_one_before(times_of):
    """The first step after another kind still has that one's work in its time."""
    assert times_of(decoding(1.0), decoding(2.0), decoding(4.0)) == (2.0, 4.0)


@pytest.mark.parametrize("other", [PREFILLING, WAITING, ALONE])
def test_steps_that_do_more_or_less_are_not_timed(times_of, other):
    moments = [decoding(1.0), decoding(2.0), other, decoding(4.0), decoding(8.0), other]
    assert times_of(*moments) == (2.0, 8.0)


def test_every_other_pass_takes_the_contenders_in_reverse_order():
    schedule = Schedule(work=[], concurrencies=[1, 8], passes=3)
    engine = ScriptedEngine([], Clock())
    contenders = [Contender(name, engine) for name in ("none", "dflash", "ngram")]
    order = lambda number: [
        (concurrency, one.method) for concurrency, one in _turns(contenders, schedule, number)
    ]
    forth, back = ["none", "dflash", "ngram"], ["ngram", "dflash", "none"]
    assert order(0) == order(2) == [(1, name) for name in forth] + [(8, name) for name in forth]
    assert order(1) == [(1, name) for name in back] + [(8, name) for name in back]
