"""Methods over the same requests, pass by pass in turn: who takes part, warm-up, passes, rows."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from jaxspec.acceptance.synthetic import SyntheticAcceptance
from jaxspec.engine.engine import Engine
from jaxspec.engine.plan.options import Acceptance
from jaxspec.engine.plan.plan import synthetic_of
from jaxspec.measure.compile_clock import CompileClock
from jaxspec.measure.contenders import compile_all
from jaxspec.measure.floor import step_bytes
from jaxspec.measure.load import Load, Run, Work, run_load
from jaxspec.measure.options import Passes
from jaxspec.measure.results import add_speedups, row_of

Bar = Callable[[int, str, str], AbstractContextManager[Any]]
"""Opens a progress bar of this total, name and unit."""


@dataclasses.dataclass(frozen=True)
class Contender:
    """A method, and where acceptance is drawn, what it is drawn like."""

    method: str
    """A name of `METHODS`."""
    engine: Engine
    """Of the method; contenders that differ in drawn acceptance alone share one."""
    label: str = ""
    """Of the acceptance, "GSM8K" for one; empty where there is only one."""
    drawn: SyntheticAcceptance | None = None
    """Acceptance; None compares the drafts."""

    @property
    def name(self) -> str:
        return f"{self.method} {self.label}".rstrip()

    def take_the_stage(self) -> None:
        """Acceptance is data of the programs: they need not be compiled again."""
        if self.drawn is not None:
            self.engine.loop.device.params |= {"synthetic": self.drawn.on_device}


@dataclasses.dataclass(frozen=True)
class Schedule(Passes):
    """What everybody is sent."""

    work: Sequence[Work]
    """The requests."""
    concurrencies: Sequence[int]
    """At once, at most; every pass goes through all of them."""

    @property
    def draws(self) -> bool:
        """Whether some request wants more than the likeliest token."""
        return any(one.params.draws for one in self.work)

    @property
    def mean_prompt(self) -> int:
        return sum(len(one.prompt) for one in self.work) // len(self.work)

    def sent(self, concurrency: int) -> Sequence[Work]:
        """The requests of one pass: all, or so many per slot, from the start again if need be."""
        if self.requests_per_slot is None:
            return self.work
        count = self.requests_per_slot * concurrency
        return (list(self.work) * -(-count // len(self.work)))[:count]

    def tokens_of_a_pass(self) -> int:
        """Of one contender, at all concurrencies."""
        sent = (one for concurrency in self.concurrencies for one in self.sent(concurrency))
        return sum(one.params.max_tokens for one in sent)


def contenders_of(
    engines: dict[str, Engine], acceptances: dict[str, Acceptance]
) -> list[Contender]:
    """Drafting methods once per acceptance; plain decoding accepts nothing and comes once."""
    found = []
    for method, engine in engines.items():
        places = engine.loop.plan.block_size - 1
        asked = acceptances if method != "none" else {}
        drawn = {label: synthetic_of(one, places) for label, one in asked.items()} or {"": None}
        found += [Contender(method, engine, *pair) for pair in drawn.items()]
    return found


def warm_up(contenders: Sequence[Contender], schedule: Schedule, bar: Bar) -> None:
    """Compiles everything, then sends a short reply's worth of every load."""
    engines = {id(one.engine): one for one in reversed(contenders)}.values()
    with bar(len(engines) * len(schedule.concurrencies), "warm-up", "") as shown:
        compile_all([one.engine for one in engines], schedule.draws)
        for one in engines:
            one.take_the_stage()
            for concurrency in schedule.concurrencies:
                run_load(one.engine, _short(schedule, concurrency), Load(concurrency))
                shown.update(1)


def _short(schedule: Schedule, concurrency: int) -> list[Work]:
    work = (list(schedule.work) * concurrency)[: max(concurrency, 2)]
    tokens = [min(8, one.params.max_tokens) for one in work]
    return [
        Work(one.prompt, dataclasses.replace(one.params, max_tokens=most))
        for one, most in zip(work, tokens)
    ]


def compare(
    contenders: Sequence[Contender], schedule: Schedule, bytes_per_second: float, bar: Bar
) -> list[dict[str, Any]]:
    """A row per contender and concurrency."""
    clock = CompileClock()
    runs: dict[tuple[str, int], list[Run]] = {}
    compiled: dict[tuple[str, int], float] = {}
    tokens = schedule.tokens_of_a_pass() * schedule.passes * len(contenders)
    with bar(tokens, "measuring", "tok") as shown:
        for turn, concurrency, one in _turns(contenders, schedule):
            before, at = clock.seconds, (one.name, concurrency)
            one.take_the_stage()
            load = Load(concurrency, schedule.request_rate, schedule.seed + turn)
            run = run_load(one.engine, schedule.sent(concurrency), load, shown.update)
            runs.setdefault(at, []).append(run)
            compiled[at] = compiled.get(at, 0.0) + clock.seconds - before
    rows = [
        _row(one, concurrency, runs[one.name, concurrency], bytes_per_second)
        | {"compile_s_while_measured": compiled[one.name, concurrency]}
        for concurrency in schedule.concurrencies
        for one in contenders
    ]
    add_speedups(rows, "none")
    return rows


def _turns(
    contenders: Sequence[Contender], schedule: Schedule
) -> Iterable[tuple[int, int, Contender]]:
    """Everybody in every pass, in turns that alternate, so that drift hits all alike."""
    for turn in range(schedule.passes):
        for concurrency in schedule.concurrencies:
            for one in contenders if turn % 2 == 0 else reversed(contenders):
                yield turn, concurrency, one


def _row(
    one: Contender, concurrency: int, runs: Sequence[Run], bytes_per_second: float
) -> dict[str, Any]:
    device = one.engine.loop.device
    least = step_bytes(device.models, device.params)
    named = {"method": one.method, "acceptance_of": one.label}
    if one.drawn is not None:
        named["drawn_length"] = one.drawn.mean_length
    return named | row_of(concurrency, runs, least, bytes_per_second)
