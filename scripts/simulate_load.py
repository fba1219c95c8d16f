"""Simulates the engine's loop under load, with given step times. Needs no GPU.

    python scripts/simulate_load.py --json load.json
    python scripts/simulate_load.py --unsteady --only while_prompts_arrive at_rate

The loop, its plan and its ledger are the real ones. Only the device is simulated: a program does no
work, takes the time that was measured for it, and begins when the program before it has ended. Its
result can be read when it has ended. Requests are timed by the simulated clock. How many drafts a
step accepts is drawn from the request's number and length, so that it does not depend on the
policy. The same options always give the same figures.

Times are of the 8B shape on one H100. A decode step takes `dflash_engine_ms` of steps-8b-h100.json
for its batch size; 24 requests were not measured and are taken to be halfway between 16 and 32. A
prefill takes the time per token of prefill-8b-h100.json for all tokens of its shape, padding
included, the time for attention to the tokens that its prompts have in the cache, and `CALL_MS` per
call. `CALL_MS` is chosen so that calls of 1 and 4 prompts of 512 tokens take 13 and 44 ms, as in
runs of the bench. No prefill takes less than a plain decode step at one slot, which reads the
weights. A decode step that also reads a chunk of a prompt was not measured. Each row of the chunk
has as many tokens as a request in a step, and is taken to cost as much as one more request, between
the measured batch sizes and beyond the largest, although nothing is drafted for it; attention to
the cached tokens of the prompt is added. Every program takes exactly its time; with `--unsteady`
times vary as those of steps in the server did (`step_ms` of serving-h100.json), where the 99th
percentile was 1.21 times the median.

The host's time per program and per request that is read follows from the two figures of
host-cpu.json for a step of 1 and of 32 requests. A program that gives requests their slots takes
the host a 32nd of what the last of 32 requests waited for its slot in bench-8b-h100.json, whose
engine gave every slot by a program of its own before it launched anything else. The caller takes
no time between two steps.

**The ideal** of a pass is what steady decoding and prefill allow: its prompt tokens at the time per
token, and then its other tokens (all but the first of each request, which prefill gives) at the
rate of a steady step in which every slot decodes, `slots x drawn acceptance length / step`. It
leaves out the pass's beginning and end, padding, the times per call, and the host. The share is the
ideal time over the simulated one.
"""

import argparse
import bisect
import collections
import dataclasses
import itertools
import json
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from measuring import about, write_json
from timed_device import CALL_MS, TOKEN, Times, device_of, read_times, simulated_engine

from jaxspec.engine.engine import Engine
from jaxspec.engine.requests.sampling_params import SamplingParams

SLOTS = (1, 8, 32)
PROMPT, OUTPUT, REQUESTS_PER_SLOT = 512, 192, 2
LONG, SHORT = 8192, 50
DRAWS = 12
BAR = 1.3
"""While prompts come, gaps should be no longer than this many times the median gap."""
MOST_NAMED = 5


# Requests that come at their times


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request of a scenario."""

    at_ms: float | None
    """When it comes; None if it comes as soon as there is room among the requests at once."""
    prompt: int
    """Tokens of the prompt."""
    output: int


@dataclasses.dataclass
class Life:
    """When a request came, and when it got tokens."""

    came: float
    times: list[float] = dataclasses.field(default_factory=list)
    tokens: int = 0
    steps: int = 0
    drawn: int = 0

    @property
    def first_token_ms(self) -> float:
        return self.times[0] - self.came

    def gaps_between(self, begin: float, end: float) -> list[float]:
        """The gaps between pieces of the answer that overlap this interval."""
        return [after - before for before, after in self.pieces_between(begin, end)]

    def pieces_between(self, begin: float, end: float) -> list[tuple[float, float]]:
        """The beginning and the end of each gap between pieces that overlaps this interval."""
        pairs = itertools.pairwise(self.times)
        return [(before, after) for before, after in pairs if after > begin and before < end]


def lived(engine: Engine, arrivals: Sequence[Arrival], at_once: int) -> list[Life]:
    """Runs requests to their ends, at most `at_once` at a time."""
    clock = device_of(engine).clock
    due, live, lives = deque(arrivals), {}, []
    while due or live:
        if not live:
            clock.milliseconds = max(clock.milliseconds, due[0].at_ms or 0.0)
        while due and len(live) < at_once and (due[0].at_ms or 0.0) <= clock.milliseconds:
            one = due.popleft()
            params = SamplingParams(max_tokens=one.output, ignore_eos=True)
            id = engine.submit([TOKEN] * one.prompt, params)
            live[id] = Life(clock.milliseconds if one.at_ms is None else one.at_ms)
            lives.append(live[id])
        for event in engine.step(live):
            _note(live[event.index], event, clock.milliseconds)
            if event.output is not None:
                stats = event.output.stats
                live[event.index].steps = stats.num_spec_steps
                live[event.index].drawn = stats.num_spec_steps + stats.num_accepted_draft_tokens
                del live[event.index]
    return lives


def _note(life: Life, event: Any, now: float) -> None:
    if event.token_ids:
        life.times.append(now)
        life.tokens += len(event.token_ids)


# What is measured


def whole_passes(times: Times, slots: int, **options: Any) -> dict[str, Any]:
    """The bench's pass, with several draws of acceptance. All but the shares are of the first."""
    seeds = [1000 * draw for draw in range(DRAWS)]
    passes = [whole_pass(times, slots, **{"seed": seed} | options) for seed in seeds]
    shares = [one["share"] for one in passes]
    return passes[0] | {"share": statistics.mean(shares), "share_of_each_draw": shares}


def half_full(times: Times, slots: int, **options: Any) -> dict[str, Any]:
    """Half as many requests at once as there are slots. A new request comes when another ends."""
    speeds, gaps, firsts = [], [], []
    for draw in range(DRAWS):
        engine = simulated_engine(times, slots, **{"seed": 1000 * draw} | options)
        work = [Arrival(None, PROMPT, OUTPUT)] * (REQUESTS_PER_SLOT * slots)
        lives = lived(engine, work, at_once=slots // 2)
        took = device_of(engine).clock.milliseconds
        speeds.append(1e3 * sum(one.tokens for one in lives) / took)
        gaps += [gap for one in lives for gap in one.gaps_between(0, took)]
        firsts += [one.first_token_ms for one in lives]
    named = {"slots": slots, "tokens_per_s": statistics.mean(speeds)}
    return named | _percentiles("first_token_ms", firsts) | _percentiles("gap_ms", gaps)


def whole_pass(times: Times, slots: int, **options: Any) -> dict[str, Any]:
    """As many requests at once as there are slots. A new request comes when another ends."""
    engine = simulated_engine(times, slots, **options)
    work = [Arrival(None, PROMPT, OUTPUT)] * (REQUESTS_PER_SLOT * slots)
    lives = lived(engine, work, at_once=slots)
    took = device_of(engine).clock.milliseconds
    drawn = sum(one.drawn for one in lives) / sum(one.steps for one in lives)
    tokens = sum(one.tokens for one in lives)
    reading = len(work) * PROMPT * times.per_token
    decoding = (tokens - len(work)) / (slots * drawn) * times.decode[slots]
    return {
        "slots": slots,
        "requests": len(work),
        "drawn_length": drawn,
        "tokens_per_s": 1e3 * tokens / took,
        "ideal_tokens_per_s": 1e3 * tokens / (reading + decoding),
        "share": (reading + decoding) / took,
        "device_busy": device_of(engine).busy / took,
        "programs": _counted(device_of(engine).launched),
    } | _percentiles("gap_ms", [gap for one in lives for gap in one.gaps_between(0, took)])


def beside_a_long_prompt(times: Times, decoding: int, **options: Any) -> dict[str, Any]:
    """Requests decode; then a prompt of 8k tokens comes, and immediately after it a short one."""
    engine = simulated_engine(times, 32, **options)
    came = 1500.0
    others = [Arrival(0.0, PROMPT, 4 * OUTPUT + 2000)] * decoding
    work = [*others, Arrival(came, LONG, OUTPUT), Arrival(came, SHORT, OUTPUT)]
    lives = lived(engine, work, at_once=32)
    *before, long, short = lives
    until = came + long.first_token_ms
    gaps = [gap for one in before for gap in one.gaps_between(came, until)]
    return {
        "decoding": decoding,
        "long_first_token_ms": long.first_token_ms,
        "short_first_token_ms": short.first_token_ms,
    } | _percentiles("gap_ms", gaps)


def while_prompts_arrive(times: Times, decoding: int, **options: Any) -> dict[str, Any]:
    """Requests decode while prompts come, two every second, each for a few tokens."""
    engine = simulated_engine(times, 32, **options)
    begin, count = 1500.0, 20
    others = [Arrival(0.0, PROMPT, 12_000)] * decoding
    come = [Arrival(begin + 500.0 * number, PROMPT, 8) for number in range(count)]
    lives = lived(engine, [*others, *come], at_once=32)
    firsts = [one.first_token_ms for one in lives[decoding:]]
    gaps = [gap for one in lives[:decoding] for gap in one.gaps_between(begin, begin + 500 * count)]
    row: dict[str, Any] = {"decoding": decoding, "batch_sizes": engine.plan.shapes.batch_sizes}
    row |= _percentiles("first_token_ms", firsts) | _percentiles("gap_ms", gaps)
    row |= {"gap_p99_over_p50": row["gap_ms_p99"] / row["gap_ms_p50"]}
    return row | {"long_gaps": long_gaps(engine, lives[:decoding], begin, begin + 500 * count)}


def at_rate(times: Times, rate: float, **options: Any) -> dict[str, Any]:
    """Prompts come at random times, `rate` per second on average."""
    engine, count = simulated_engine(times, 32, **options), int(20 * rate)
    due = np.cumsum(np.random.default_rng(4).exponential(1e3 / rate, count))
    lives = lived(engine, [Arrival(float(at), PROMPT, OUTPUT) for at in due], at_once=count)
    per_token = [(one.times[-1] - one.times[0]) / (one.tokens - 1) for one in lives]
    row = {"arrivals_per_s": rate, "tokens_per_s": 1e3 * count * OUTPUT / lives[-1].times[-1]}
    row |= _percentiles("first_token_ms", [one.first_token_ms for one in lives])
    row |= _percentiles("gap_ms", [gap for one in lives for gap in one.gaps_between(0, due[-1])])
    row |= _percentiles("per_token_ms", per_token)
    return row | {"long_gaps": long_gaps(engine, lives, 0, due[-1])}


def long_gaps(engine: Engine, lives: Sequence[Life], begin: float, end: float) -> dict[str, Any]:
    """The share of the gaps that are longer than the bar, and what ran in those."""
    pairs = [pair for one in lives for pair in one.pieces_between(begin, end)]
    bar = BAR * statistics.median([after - before for before, after in pairs])
    device, ran = device_of(engine), collections.Counter()
    for before, after in pairs:
        if after - before > bar:
            first, last = (bisect.bisect_right(device.ended, at) for at in (before, after))
            ran[" + ".join(map(_named, device.launched[first:last]))] += 1
    return {"share": ran.total() / len(pairs), "programs": dict(ran.most_common(MOST_NAMED))}


def burst(times: Times, decoding: int, count: int, **options: Any) -> dict[str, Any]:
    """Many short prompts come at once."""
    engine = simulated_engine(times, 32, **options)
    came = 1500.0 if decoding else 0.0
    others = [Arrival(0.0, PROMPT, 4 * OUTPUT + 2000)] * decoding
    lives = lived(engine, [*others, *[Arrival(came, SHORT, OUTPUT)] * count], at_once=32)
    firsts = [one.first_token_ms for one in lives[decoding:]]
    until = came + max(firsts)
    gaps = [gap for one in lives[:decoding] for gap in one.gaps_between(came, until)]
    named = {"decoding": decoding, "short_prompts": count}
    return named | _percentiles("first_token_ms", firsts) | _percentiles("gap_ms", gaps)


def _percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {
        f"{name}_p50": statistics.median(values),
        f"{name}_p99": float(np.percentile(values, 99)),
        f"{name}_max": max(values),
    }


def _counted(launched: Sequence[tuple[str, int, int]]) -> dict[str, int]:
    names = [_named(one) for one in launched]
    return {name: names.count(name) for name in dict.fromkeys(names)}


def _named(program: tuple[str, int, int]) -> str:
    name, batch, width = program
    return f"{name} {batch} x {width}"


Case = tuple[str, Callable[..., dict[str, Any]], tuple[Any, ...], dict[str, Any]]
"""A name, a function, its arguments after the times, and options of the engine."""


def cases() -> Iterator[Case]:
    for slots in SLOTS:
        yield "whole_pass", whole_passes, (slots,), {}
    for slots in (8, 16, 32):
        yield "half_full", half_full, (slots,), {}
    for decoding in (1, 8, 30):
        yield "beside_a_long_prompt", beside_a_long_prompt, (decoding,), {}
    for decoding in (1, 8, 16, 30):
        yield "while_prompts_arrive", while_prompts_arrive, (decoding,), {}
    yield (
        "while_prompts_arrive",
        while_prompts_arrive,
        (16,),
        {"batch_sizes": (1, 32)},
    )  # as in bench_serving.py
    for rate in (2.0, 5.0, 10.0, 15.0):
        yield "at_rate", at_rate, (rate,), {}
    for sizes in ((0, 32), (16, 16)):
        yield "burst", burst, sizes, {}


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--options", type=json.loads, default={}, help="engine options as JSON")
    parser.add_argument("--unsteady", action="store_true", help="times vary as measured")
    names = [*dict.fromkeys(name for name, *_ in cases())]
    parser.add_argument("--only", nargs="+", default=names, choices=names)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    times = read_times(arguments.unsteady)
    report: dict[str, Any] = about() | {"options": arguments.options}
    report["times_ms"] = dataclasses.asdict(times) | {"call": CALL_MS}
    options = {name: _as_tuples(value) for name, value in arguments.options.items()}
    for name, simulated, sizes, of_case in cases():
        if name in arguments.only:
            row = simulated(times, *sizes, **options | of_case)
            report.setdefault(name, []).append(row)
            print(name, json.dumps(row), flush=True)
    write_json(arguments.json, report)


if __name__ == "__main__":
    main()
