"""Putting an engine under load: so many requests at once, or arriving at a rate."""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from jaxspec.engine.engine import Engine
from jaxspec.engine.requests.output import RequestOutput
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.errors import LoadError


@dataclasses.dataclass(frozen=True)
class Work:
    """One request of a benchmark."""

    prompt: tuple[int, ...]
    """Token ids."""
    params: SamplingParams
    """How to continue it."""


@dataclasses.dataclass(frozen=True)
class Load:
    """How requests come."""

    concurrency: int
    """At once, at most."""
    request_rate: float | None = None
    """Arrivals per second, exponential gaps; None sends the next as soon as one has ended."""
    seed: int = 0
    """Of the gaps."""


@dataclasses.dataclass(frozen=True)
class Run:
    """What one pass over the requests gave."""

    seconds: float
    """From the first submission to the last token."""
    outputs: tuple[RequestOutput, ...]
    step_s: tuple[float, ...]
    """Of steps in which every slot of the load was decoding and nobody's prompt was read."""


def run_load(
    engine: Engine,
    work: Sequence[Work],
    load: Load,
    tell: Callable[[int], None] = lambda tokens: None,
) -> Run:
    """One pass; `tell` hears how many tokens came."""
    pending = deque(zip(due_times(len(work), load), work, strict=True))
    outputs, live, steps, steady_before = {}, set(), [], False
    begin = time.perf_counter()
    while pending or live:
        now = time.perf_counter() - begin
        while pending and len(live) < load.concurrency and pending[0][0] <= now:
            _, next_work = pending.popleft()
            live.add(engine.submit(next_work.prompt, next_work.params))
        if not live:
            time.sleep(max(pending[0][0] - now, 0.0))
            continue
        steady = _is_steady(engine, load.concurrency)
        started = time.perf_counter()
        events = engine.step(live)
        if steady and steady_before:
            steps.append(time.perf_counter() - started)
        steady_before = steady
        for event in events:
            tell(len(event.token_ids))
            if event.output is not None:
                outputs[event.index] = event.output
                live.discard(event.index)
    seconds = time.perf_counter() - begin
    _check(outputs.values())
    return Run(seconds, tuple(outputs[id] for id in sorted(outputs)), tuple(steps))


def due_times(count: int, load: Load) -> list[float]:
    """Seconds from the start at which requests may be sent."""
    if load.request_rate is None:
        return [0.0] * count
    gaps = np.random.default_rng(load.seed).exponential(1 / load.request_rate, count)
    return np.cumsum(gaps).tolist()


def _is_steady(engine: Engine, concurrency: int) -> bool:
    loop = engine.loop
    running = loop.running.values()
    return (
        not loop.waiting
        and len(running) == concurrency
        and all(request.is_prefilled and request.token_ids for request in running)
    )


def _check(outputs: Iterable[RequestOutput]) -> None:
    for output in outputs:
        if output.error is not None:
            raise LoadError(f"a request failed, so there is nothing to report: {output.error}")
