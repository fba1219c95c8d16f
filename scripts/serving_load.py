"""The loads that `bench_serving.py` puts on a server. One client process sends each load."""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.engine.engine import Engine
from jaxspec.engine.step.observer import StepObserver
from jaxspec.errors import LoadError

CLIENT = Path(__file__).with_name("stream_client.py")
HOST = "127.0.0.1"
LONG_ANSWERS = 4
"""Answers during which other prompts arrive are this many times as long as the other answers."""
PAUSE, BETWEEN = 0.25, 0.5
"""Seconds between the time when all long answers have begun and the next prompt, and between the
prompts after that. During the pause the gap ends in which the last prompts of the long answers were
read; it would otherwise count as one that the next prompt caused."""
SHORT = 4
"""Prompts that arrive during one round of long answers."""
ROUNDS = 5
"""The most rounds that are run to find a gap."""
Requests = Sequence[tuple[float, list[int], int]]
"""When each request is sent, its prompt, and how many tokens are asked."""
Seen = list[dict[str, Any]]
"""What the client noted about each request."""


class StepTimes(StepObserver):
    """Times between the beginnings of steps while every stream decodes."""

    def __init__(self, engine: Engine, streams: int):
        self.engine, self.streams = engine, streams
        self.gaps: list[float] = []
        self.last: float | None = None

    def step_begins(self, running: int) -> None:
        now, engine = time.perf_counter(), self.engine
        steady = engine.num_waiting == 0 and engine.num_decoding == running == self.streams
        if steady and self.last is not None:
            self.gaps.append(now - self.last)
        self.last = now if steady else None

    @property
    def milliseconds(self) -> dict[str, float]:
        return quantiles(self.gaps)


class Load:
    """Puts load on a server. Prompts are random tokens, and no two are alike."""

    def __init__(self, port: int, options: argparse.Namespace):
        self.port, self.options = port, options
        self.random = np.random.default_rng(options.streams)

    def prompts(self, count: int, tokens: int | None = None) -> list[list[int]]:
        sizes = count, tokens or self.options.prompt
        return self.random.integers(2, 400, sizes).tolist()

    def ask(self, requests: Requests, behind: int = 0) -> Seen:
        """Sends requests, and returns what the client noted. If `behind` is not 0, the requests
        after the first `behind` are sent once all of the first ones have begun to get answers, and
        their times count from then on."""
        asked = [
            {
                "at": at,
                "behind": behind if place >= behind else 0,
                "body": {
                    "prompt": prompt,
                    "max_tokens": tokens,
                    "temperature": 0,
                    "ignore_eos": True,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                },
            }
            for place, (at, prompt, tokens) in enumerate(requests)
        ]
        plan = json.dumps({"host": HOST, "port": self.port, "requests": asked})
        client = [sys.executable, str(CLIENT)]
        ran = subprocess.run(client, input=plan, stdout=subprocess.PIPE, text=True, check=True)
        seen = json.loads(ran.stdout)
        assert all(one["status"] == 200 and one["usage"] for one in seen), seen
        return seen

    def first_bytes(self) -> dict[str, float]:
        """Times to the first token of a lone request."""
        seen = [self.ask([(0.0, prompt, 2)]) for prompt in self.prompts(8)]
        return quantiles([one[0]["times"][0] for one in seen][1:])

    def steps(self, engine: Engine, seconds: float) -> dict[str, float]:
        """Times of the steps in which all streams decode."""
        times = StepTimes(engine, self.options.streams)
        deadline = time.perf_counter() + seconds
        with engine.observe(times):
            while time.perf_counter() < deadline or not times.gaps:
                asked = self.prompts(self.options.streams)
                self.ask([(0.0, prompt, self.options.tokens) for prompt in asked])
        return times.milliseconds

    def gaps(self, seconds: float) -> dict[str, float]:
        """Gaps between the pieces of half of the streams while other requests come and go. Gaps
        count from the first of these on."""
        short = lambda: [
            (PAUSE + BETWEEN * at, prompt, 8) for at, prompt in enumerate(self.prompts(SHORT))
        ]
        return quantiles(self.gaps_beside(short, seconds)[0])

    def beside_a_long_prompt(self, seconds: float) -> dict[str, Any]:
        """The same gaps while one long prompt is read."""
        options = self.options
        long = lambda: [(PAUSE, prompt, 2) for prompt in self.prompts(1, options.long_prompt)]
        gaps, firsts = self.gaps_beside(long, seconds)
        longest = 1e3 * max(gaps)
        return {
            "prompt": options.long_prompt,
            "first_byte_ms": quantiles(firsts),
            "gap_ms": quantiles(gaps),
            "longest_gap_ms": round(longest, 3),
            "bound_ms": options.bound,
            "below_the_bound": longest < options.bound,
        }

    def gaps_beside(
        self, others: Callable[[], Requests], seconds: float
    ) -> tuple[list[float], list[float]]:
        """Gaps of half of the streams while other requests come, and how long the last one of these
        waited for its first token, in rounds until the time is over."""
        gaps, waits = [], []
        deadline = time.perf_counter() + seconds
        for rounds in itertools.count(1):
            found, wait = self.round_of_gaps(others())
            gaps, waits = gaps + found, [*waits, wait]
            if time.perf_counter() > deadline and (gaps or rounds == ROUNDS):
                break
        if not gaps:
            raise LoadError("the streams ended before other prompts were read; ask more --tokens")
        return gaps, waits

    def round_of_gaps(self, others: Requests) -> tuple[list[float], float]:
        """Gaps from when the first of the other requests is sent until the last of them has its
        first token, and how long that one waited for it."""
        long = self.decoding()
        seen = self.ask([*long, *others], behind=len(long))
        begin, wait = seen[len(long)]["sent"], seen[-1]["times"][0]
        end = seen[-1]["sent"] + wait
        return [gap for one in seen[: len(long)] for gap in gaps_in(one, begin, end)], wait

    def decoding(self) -> Requests:
        """Requests for half of the streams, with long answers."""
        half = self.prompts(max(self.options.streams // 2, 1))
        return [(0.0, prompt, LONG_ANSWERS * self.options.tokens) for prompt in half]

    def at_rate(self, rate: float, seconds: float) -> dict[str, Any]:
        """Latencies if prompts come at random times, `rate` per second on average."""
        count = max(int(rate * seconds), 2)
        due = np.cumsum(np.random.default_rng(4).exponential(1 / rate, count)).tolist()
        begin = time.perf_counter()
        seen = self.ask(
            [(at, one, self.options.tokens) for at, one in zip(due, self.prompts(count))]
        )
        took = time.perf_counter() - begin
        tokens = sum(one["usage"]["completion_tokens"] for one in seen)
        spans = [(one["times"][-1] - one["times"][0], one["usage"]) for one in seen]
        per_token = [span / max(usage["completion_tokens"] - 1, 1) for span, usage in spans]
        row = {
            "arrivals_per_s": rate,
            "requests": count,
            "first_byte_ms": quantiles([one["times"][0] for one in seen]),
            "per_token_ms": quantiles(per_token),
            "tokens_per_s": tokens / took,
        }
        gaps = [gap for one in seen for gap in gaps_in(one, 0.0, ended(seen[-1]))]
        return row | ({"gap_ms": quantiles(gaps)} if gaps else {})


def gaps_in(one: dict[str, Any], begin: float, end: float) -> list[float]:
    """The gaps between pieces of an answer that overlap this interval of the client's clock."""
    times = [one["sent"] + at for at in one["times"]]
    return [b - a for a, b in itertools.pairwise(times) if b > begin and a < end]


def ended(one: dict[str, Any]) -> float:
    return one["sent"] + one["times"][-1]


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    p50, p95, p99 = np.quantile(seconds, [0.5, 0.95, 0.99])
    values = {"p50": p50, "p95": p95, "p99": p99, "mean": statistics.fmean(seconds)}
    values |= {"most": max(seconds)}
    return {name: round(1e3 * float(value), 3) for name, value in values.items()} | {
        "count": len(seconds)
    }
