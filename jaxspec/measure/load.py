"""Putting an engine under load: a number of requests at once, or arrivals at a rate."""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from jaxspec.engine.engine import Engine
from jaxspec.engine.requests.output import RequestOutput
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.errors import LoadError
from jaxspec.measure.options import Passes


@dataclasses.dataclass(frozen=True)
class Work:
    """One request of a benchmark."""

    prompt: tuple[int, ...]
    """Token ids."""
    params: SamplingParams
    """How the prompt is continued."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule(Passes):
    """The requests of a benchmark, and how they are sent to every contender."""

    work: Sequence[Work]
    """The requests."""
    concurrencies: Sequence[int]
    """Largest numbers of requests at once; every pass measures all of them."""

    @property
    def draws(self) -> bool:
        """Whether some request needs more than the likeliest token."""
        return any(one.params.draws for one in self.work)

    @property
    def mean_prompt(self) -> int:
        """Mean length of the prompts, in tokens."""
        return sum(len(one.prompt) for one in self.work) // len(self.work)

    def requests_of_a_pass(self, concurrency: int) -> Sequence[Work]:
        """All requests, or `requests_per_slot` per slot, repeated if there are fewer."""
        if self.requests_per_slot is None:
            return self.work
        count = self.requests_per_slot * concurrency
        return (list(self.work) * -(-count // len(self.work)))[:count]

    def tokens_of_a_pass(self) -> int:
        """Most tokens that one contender generates in a pass, all concurrencies together."""
        passes = (self.requests_of_a_pass(concurrency) for concurrency in self.concurrencies)
        return sum(one.params.max_tokens for work in passes for one in work)


@dataclasses.dataclass(frozen=True)
class Load:
    """How the requests of one pass arrive."""

    concurrency: int
    """Most requests at once."""
    request_rate: float | None = None
    """Arrivals per second, with exponential gaps; None sends a request as soon as another ends."""
    seed: int = 0
    """Seed of the gaps."""


@dataclasses.dataclass(frozen=True)
class Run:
    """The measurements of one pass over the requests."""

    seconds: float
    """Seconds from the first submission to the last token."""
    outputs: tuple[RequestOutput, ...]
    step_s: tuple[float, ...]
    """Seconds of each step in which every slot of the load decoded and no prompt was read."""


def run_load(
    engine: Engine,
    work: Sequence[Work],
    load: Load,
    on_tokens: Callable[[int], object] = lambda count: None,
) -> Run:
    """Runs one pass, and calls `on_tokens` after every step with the number of new tokens."""
    this_pass = _Pass(engine, work, load)
    begin = time.perf_counter()
    while this_pass.arrivals or this_pass.live:
        now = time.perf_counter() - begin
        this_pass.submit_due(now)
        if this_pass.live:
            on_tokens(this_pass.step())
        else:
            time.sleep(max(this_pass.arrivals[0][0] - now, 0.0))
    seconds = time.perf_counter() - begin
    outputs = tuple(this_pass.outputs[id] for id in sorted(this_pass.outputs))
    _check(outputs)
    return Run(seconds, outputs, tuple(this_pass.step_s))


class _Pass:
    """The state of a running pass."""

    def __init__(self, engine: Engine, work: Sequence[Work], load: Load):
        self.engine = engine
        self.concurrency = load.concurrency
        self.arrivals = deque(zip(due_times(len(work), load), work, strict=True))
        self.live: set[int] = set()
        self.outputs: dict[int, RequestOutput] = {}
        self.step_s: list[float] = []
        self.was_steady = False

    def submit_due(self, now: float) -> None:
        """Submits the requests that are due, up to the load's number of requests at once."""
        while self.arrivals and len(self.live) < self.concurrency and self.arrivals[0][0] <= now:
            _, work = self.arrivals.popleft()
            self.live.add(self.engine.submit(work.prompt, work.params))

    def step(self) -> int:
        """One step of the engine; returns the number of new tokens."""
        steady = _is_steady(self.engine, self.concurrency)
        begin = time.perf_counter()
        events = self.engine.step(self.live)
        if steady and self.was_steady:
            self.step_s.append(time.perf_counter() - begin)
        self.was_steady = steady
        for event in events:
            if event.output is not None:
                self.outputs[event.index] = event.output
                self.live.discard(event.index)
        return sum(len(event.token_ids) for event in events)


def due_times(count: int, load: Load) -> list[float]:
    """Seconds from the start at which requests may be sent."""
    if load.request_rate is None:
        return [0.0] * count
    gaps = np.random.default_rng(load.seed).exponential(1 / load.request_rate, count)
    return np.cumsum(gaps).tolist()


def _is_steady(engine: Engine, concurrency: int) -> bool:
    return engine.num_waiting == 0 and engine.num_decoding == engine.num_running == concurrency


def _check(outputs: Iterable[RequestOutput]) -> None:
    for output in outputs:
        if output.error is not None:
            raise LoadError(f"a request failed, so there is nothing to report: {output.error}")
