"""What the server adds to the engine, and how it behaves under load.

    python scripts/bench_serving.py --model qwen3-8b --seconds 400 --json serving.json

Weights are random, acceptance is synthetic, and the server runs in this process, so that the same
engine is measured with and without it; the client is a process of its own. Measured are: the time
of a step with all streams decoding, the time to the first token, the gaps between the pieces of a
stream while other prompts arrive, and the latencies at several rates of arrivals.
"""

import argparse
import asyncio
import dataclasses
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from measuring import about, tell, write_json

from jaxspec import cli
from jaxspec.engine.engine import Engine
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.engine.step.observer import StepObserver
from jaxspec.measure.drawing import check_plot, pyplot
from jaxspec.measure.engines import compile_all, engine_for, random_pair
from jaxspec.models.shapes import NAMES
from jaxspec.serving.listening import bound_socket
from jaxspec.serving.options import ServingOptions
from jaxspec.serving.running import run
from jaxspec.serving.service import Service

CLIENT = Path(__file__).with_name("stream_client.py")
HOST = "127.0.0.1"
LONG_ANSWERS = 4
"""How many times as long as the others the answers are during which other prompts arrive."""
ENDING_SECONDS = 10
"""How long the server may take to end."""
SHARES = {"steps": 0.15, "gaps": 0.2, "curve": 0.45}
"""Parts of the time that each measurement may take."""


def main() -> None:
    options = parse()
    check_plot(options.plot)
    begin = time.perf_counter()
    engine = make_engine(options)
    tell(f"{compile_all([engine], draws=False)} programs ready", begin)
    report = about() | {name: getattr(options, name) for name in ("model", "streams", "prompt")}
    report["in_process"] = in_process(engine, options)
    say(report, "in_process", begin)
    with_server(engine, options, report, begin)
    compared(report)
    write_json(options.json, report)
    if options.plot:
        draw(options.plot, report["curve"])
    print(json.dumps(report["server_over_in_process"], indent=2))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="qwen3-8b", choices=NAMES)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--accepted", type=float, default=4.0, help="mean acceptance length")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--tokens", type=int, default=192, help="tokens of an answer")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--rates", type=float, nargs="+", default=[2, 5, 10, 15, 20, 25])
    parser.add_argument("--seconds", type=float, default=300.0, help="time for all measurements")
    parser.add_argument("--json", help="file for the report")
    parser.add_argument("--plot", help="picture of the curve")
    return parser.parse_args()


class NumberTexts:
    """Stands for a tokenizer: the text of a token is its number, as long as a usual word."""

    special_ids: frozenset[int] = frozenset()

    def token_bytes(self, id: int) -> bytes:
        return b" %d" % id


def make_engine(options: argparse.Namespace) -> Engine:
    opened = random_pair(options.model, options.block_size, options.dtype)
    texts: Any = NumberTexts()
    opened = dataclasses.replace(opened, tokenizer=texts)
    longest = options.prompt + LONG_ANSWERS * options.tokens
    pages_each = -(-(longest + options.block_size) // options.page_size)
    return engine_for(
        opened,
        "dflash",
        sorted({1, options.streams}),
        [options.prompt],
        max_batch=options.streams,
        max_model_len=longest,
        page_size=options.page_size,
        num_pages=2 * pages_each * options.streams,
        synthetic_acceptance=options.accepted,
    )


def prompts(options: argparse.Namespace, count: int, seed: int) -> list[list[int]]:
    """Prompts of random tokens, none like another, so that the prefix cache finds none of them."""
    draw = np.random.default_rng(seed).integers(2, 400, (count, options.prompt))
    return draw.tolist()


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


def in_process(engine: Engine, options: argparse.Namespace) -> dict[str, Any]:
    """The engine alone, stepped by this thread as fast as it can."""
    firsts = [first_token(engine, prompt, options) for prompt in prompts(options, 8, 1)]
    times = StepTimes(engine, options.streams)
    deadline = time.perf_counter() + SHARES["steps"] * options.seconds
    with engine.observe(times):
        seed = 2
        while time.perf_counter() < deadline or not times.gaps:
            params = SamplingParams(max_tokens=options.tokens, ignore_eos=True)
            asked = prompts(options, options.streams, seed)
            live = {engine.submit(prompt, params) for prompt in asked}
            while live:
                live -= {e.index for e in engine.step(live) if e.output is not None}
            seed += 1
    return {"step_ms": times.milliseconds, "first_token_ms": quantiles(firsts[1:])}


def first_token(engine: Engine, prompt: list[int], options: argparse.Namespace) -> float:
    begin = time.perf_counter()
    id = engine.submit(prompt, SamplingParams(max_tokens=options.tokens, ignore_eos=True))
    while not engine.step([id]):
        pass
    seconds = time.perf_counter() - begin
    engine.abort(id)
    return seconds


def with_server(
    engine: Engine, options: argparse.Namespace, report: dict[str, Any], begin: float
) -> None:
    listening = bound_socket(HOST, 0)
    port = listening.getsockname()[1]
    running: list[tuple[asyncio.AbstractEventLoop, Service]] = []
    ready, serving = threading.Event(), ServingOptions(max_queued_requests=10_000)
    make = lambda: Service(("bench",), serving, lambda: engine)

    def started(service: Service) -> None:
        running.append((asyncio.get_running_loop(), service))
        ready.set()

    # A daemon, so that an error ends the script. A process must not end inside of a step.
    server = threading.Thread(target=lambda: run(make, listening, started), daemon=True)
    server.start()
    ready.wait()
    report["server"] = {"first_byte_ms": first_bytes(port, options)}
    say(report, "server", begin)
    report["server"]["step_ms"] = steps_in_server(engine, port, options)
    say(report, "server", begin)
    report["gaps"] = gaps_while_prompts_arrive(port, options)
    say(report, "gaps", begin)
    report["curve"] = []
    for rate in options.rates:
        report["curve"].append(at_rate(port, rate, options))
        tell(json.dumps(report["curve"][-1]), begin)
    [(events, service)] = running
    asyncio.run_coroutine_threadsafe(service.drain(ENDING_SECONDS), events).result()
    server.join(ENDING_SECONDS)


def ask(port: int, requests: Sequence[tuple[float, list[int], int]]) -> list[dict[str, Any]]:
    """What the client saw of requests, each a time, a prompt and a number of tokens."""
    asked = [
        {
            "at": at,
            "body": {
                "prompt": prompt,
                "max_tokens": tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        }
        for at, prompt, tokens in requests
    ]
    plan = json.dumps({"host": HOST, "port": port, "requests": asked})
    client = [sys.executable, str(CLIENT)]
    ran = subprocess.run(client, input=plan, stdout=subprocess.PIPE, text=True, check=True)
    seen = json.loads(ran.stdout)
    assert all(one["status"] == 200 and one["usage"] for one in seen), seen
    return seen


def first_bytes(port: int, options: argparse.Namespace) -> dict[str, float]:
    seen = [ask(port, [(0.0, prompt, 2)]) for prompt in prompts(options, 8, 3)]
    return quantiles([one[0]["times"][0] for one in seen][1:])


def steps_in_server(engine: Engine, port: int, options: argparse.Namespace) -> dict[str, float]:
    times, seed = StepTimes(engine, options.streams), 100
    deadline = time.perf_counter() + SHARES["steps"] * options.seconds
    with engine.observe(times):
        while time.perf_counter() < deadline or not times.gaps:
            asked = prompts(options, options.streams, seed)
            ask(port, [(0.0, prompt, options.tokens) for prompt in asked])
            seed += 1
    return times.milliseconds


def gaps_while_prompts_arrive(port: int, options: argparse.Namespace) -> dict[str, float]:
    """Half of the streams decode long answers while others come and go, one every half second.
    Gaps count once all long answers have begun: until then their own prompts are read."""
    half, seconds = max(options.streams // 2, 1), SHARES["gaps"] * options.seconds
    long = [(0.0, prompt, LONG_ANSWERS * options.tokens) for prompt in prompts(options, half, 200)]
    count = max(int(2 * seconds), 2)
    short = [(0.5 * (1 + at), one, 8) for at, one in enumerate(prompts(options, count, 201))]
    seen = ask(port, [*long, *short])
    times = [one["times"] for one in seen[:half]]
    begun = max(each[0] for each in times)
    return quantiles([b - a for each in times for a, b in zip(each, each[1:]) if a >= begun])


def at_rate(port: int, rate: float, options: argparse.Namespace) -> dict[str, Any]:
    seconds = SHARES["curve"] * options.seconds / len(options.rates)
    count = max(int(rate * seconds), 2)
    due = np.cumsum(np.random.default_rng(4).exponential(1 / rate, count)).tolist()
    asked = prompts(options, count, 300 + int(10 * rate))
    begin = time.perf_counter()
    seen = ask(port, [(at, one, options.tokens) for at, one in zip(due, asked)])
    took = time.perf_counter() - begin
    tokens = sum(one["usage"]["completion_tokens"] for one in seen)
    spans = [(one["times"][-1] - one["times"][0], one["usage"]) for one in seen]
    per_token = [span / max(usage["completion_tokens"] - 1, 1) for span, usage in spans]
    return {
        "arrivals_per_s": rate,
        "requests": count,
        "first_byte_ms": quantiles([one["times"][0] for one in seen]),
        "per_token_ms": quantiles(per_token),
        "tokens_per_s": tokens / took,
    }


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    p50, p95, p99 = np.quantile(seconds, [0.5, 0.95, 0.99])
    values = {"p50": p50, "p95": p95, "p99": p99, "mean": statistics.fmean(seconds)}
    return {name: round(1e3 * float(value), 3) for name, value in values.items()} | {
        "count": len(seconds)
    }


def compared(report: dict[str, Any]) -> None:
    alone, served, gaps = report["in_process"], report["server"], report["gaps"]
    report["server_over_in_process"] = {
        "step_ratio": served["step_ms"]["p50"] / alone["step_ms"]["p50"],
        "first_byte_later_ms": served["first_byte_ms"]["p50"] - alone["first_token_ms"]["p50"],
        "gap_p99_over_p50": gaps["p99"] / gaps["p50"],
    }


def draw(path: str, curve: Sequence[dict[str, Any]]) -> None:
    figure, axes = pyplot().subplots(1, 2, figsize=(9, 3.4))
    rates = [row["arrivals_per_s"] for row in curve]
    titles = (("first_byte_ms", "Time to the first byte"), ("per_token_ms", "Time per token"))
    for axis, (name, title) in zip(axes, titles):
        for quantile in ("p50", "p95"):
            values = [row[name][quantile] for row in curve]
            axis.plot(rates, values, marker="o", label=quantile)
        axis.set(title=title, xlabel="arrivals per second", ylabel="ms", ylim=(0, None))
        axis.legend()
    figure.tight_layout()
    figure.savefig(path)


def say(report: dict[str, Any], name: str, begin: float) -> None:
    tell(f"{name}: {json.dumps(report[name])}", begin)


if __name__ == "__main__":
    sys.exit(cli.run(main))
