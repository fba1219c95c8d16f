"""What the server adds to the engine, and how it behaves under load.

    python scripts/bench_serving.py --model qwen3-8b --json serving.json --plot curve.png
    python scripts/bench_serving.py --model qwen3-8b --phases gaps long --beside 128 64 0

Weights are random, acceptance is synthetic, and the server runs in this process, so that the same
engine is measured with and without it; the client is a process of its own. The phases are:

    steps   the time of a step in which all streams decode, in the library and in the server
    first   the time to the first token of a lone request, in both
    gaps    the gaps between the pieces of streams while other prompts arrive, two every second
    long    the same while a prompt of 8,192 tokens is read, and whether all are below `--bound`
    curve   latencies at several rates of arrivals

All of this is done for each value of `prefill_beside_decoding` that `--beside` names, by engines
that share their weights. The report has the first value at its top, and the others in `others`.
With drawn acceptance there is no prefix cache; `bench_prefix.py` measures the first token of a
prompt that comes again.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from measuring import about, tell, write_json
from serving_load import HOST, LONG_ANSWERS, Load, StepTimes, quantiles

from jaxspec import cli
from jaxspec.engine.engine import Engine
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.engine.setup.opened import Opened
from jaxspec.measure.drawing import check_plot, pyplot
from jaxspec.measure.engines import engine_for, random_pair
from jaxspec.models.shapes import NAMES
from jaxspec.serving.listening import bound_socket
from jaxspec.serving.options import ServingOptions
from jaxspec.serving.running import run
from jaxspec.serving.service import Service
from jaxspec.text.tokenizer import Tokenizer

ENDING_SECONDS = 10
"""How long the server may take to end."""
SHARES = {"steps": 0.3, "first": 0.0, "gaps": 0.2, "long": 0.1, "curve": 0.4}
"""The share of the time that each phase may take. A phase with 0 takes a few requests."""
Report = dict[str, Any]


def main() -> None:
    options = parse()
    check_plot(options.plot)
    begin = time.perf_counter()
    opened, runs = pair(options), []
    for beside in options.beside:
        engine = make_engine(opened, beside, options)
        ready = engine.warm_up()
        tell(f"prefill_beside_decoding={beside}: {ready} programs ready", begin)
        runs.append({"prefill_beside_decoding": beside} | measured(engine, options, begin))
        engine.close()
    sizes = {name: getattr(options, name) for name in ("model", "streams", "prompt", "tokens")}
    first, *others = runs
    write_json(options.json, about() | sizes | first | ({"others": others} if others else {}))
    if options.plot and "curve" in options.phases:
        draw(options.plot, runs)
    print(json.dumps([compared(run) for run in runs], indent=2))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="qwen3-8b", choices=NAMES)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--accepted", type=float, default=4.0, help="mean acceptance length")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--long-prompt", type=int, default=8192, help="tokens")
    parser.add_argument("--tokens", type=int, default=192, help="tokens of an answer")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--phases", nargs="+", default=[*SHARES], choices=[*SHARES])
    beside = "values of prefill_beside_decoding (default: 128 0)"
    parser.add_argument("--beside", type=int, nargs="+", default=[128, 0], help=beside)
    parser.add_argument("--bound", type=float, default=50.0, help="ms, of gaps in phase long")
    parser.add_argument("--rates", type=float, nargs="+", default=[5, 10, 15, 20])
    parser.add_argument("--seconds", type=float, default=110.0, help="time for all measurements")
    parser.add_argument("--json", help="file for the report")
    parser.add_argument("--plot", help="picture of the curve")
    return parser.parse_args()


class NumberTexts(Tokenizer):
    """Has no vocabulary: the text of a token is its number, as long as a usual word."""

    special_ids: frozenset[int] = frozenset()

    def token_bytes(self, id: int) -> bytes:
        return b" %d" % id


def pair(options: argparse.Namespace) -> Opened:
    opened = random_pair(options.model, options.block_size, options.dtype)
    return dataclasses.replace(opened, tokenizer=object.__new__(NumberTexts))


def make_engine(opened: Opened, beside: int, options: argparse.Namespace) -> Engine:
    usual = options.prompt + LONG_ANSWERS * options.tokens
    longest = max(usual, options.long_prompt + options.tokens)
    pages = lambda tokens: -(-(tokens + options.block_size) // options.page_size)
    return engine_for(
        opened,
        "dflash",
        sorted({1, options.streams}),
        [options.prompt, options.long_prompt],
        max_batch=options.streams,
        max_model_len=longest,
        page_size=options.page_size,
        num_pages=2 * (pages(usual) * options.streams + pages(longest)),
        prefill_beside_decoding=beside,
        synthetic_acceptance=options.accepted,
    )


def measured(engine: Engine, options: argparse.Namespace, begin: float) -> Report:
    """Measures the chosen phases, first in the library and then in the server."""
    parts = sum(SHARES[phase] for phase in options.phases) or 1.0
    seconds = {
        phase: options.seconds / len(options.beside) * SHARES[phase] / parts
        for phase in options.phases
    }
    report: Report = {}
    if alone := in_process(engine, options, seconds):
        report["in_process"] = alone
        tell(f"in_process: {json.dumps(alone)}", begin)
    with serving(engine) as port:
        for name, value in in_server(engine, Load(port, options), options, seconds):
            report |= {name: report[name] | value if name == "server" and name in report else value}
            tell(f"{name}: {json.dumps(value)}", begin)
    return report


def in_server(
    engine: Engine, load: Load, options: argparse.Namespace, seconds: dict[str, float]
) -> Iterator[tuple[str, Any]]:
    if "first" in seconds:
        yield "server", {"first_byte_ms": load.first_bytes()}
    if "steps" in seconds:
        yield "server", {"step_ms": load.steps(engine, seconds["steps"] / 2)}
    if "gaps" in seconds:
        yield "gaps", load.gaps(seconds["gaps"])
    if "long" in seconds:
        yield "beside_a_long_prompt", load.beside_a_long_prompt(seconds["long"])
    if "curve" in seconds:
        each = seconds["curve"] / len(options.rates)
        yield "curve", [load.at_rate(rate, each) for rate in options.rates]


def in_process(engine: Engine, options: argparse.Namespace, seconds: dict[str, float]) -> Report:
    """Measures the engine alone, with steps by this thread as fast as it can."""
    load, report = Load(0, options), {}
    if "steps" in seconds:
        report["step_ms"] = steps_in_process(engine, load, options, seconds["steps"] / 2)
    if "first" in seconds:
        firsts = [first_token(engine, prompt, options) for prompt in load.prompts(8)]
        report["first_token_ms"] = quantiles(firsts[1:])
    return report


def steps_in_process(
    engine: Engine, load: Load, options: argparse.Namespace, seconds: float
) -> dict[str, float]:
    times = StepTimes(engine, options.streams)
    deadline = time.perf_counter() + seconds
    params = SamplingParams(max_tokens=options.tokens, ignore_eos=True)
    with engine.observe(times):
        while time.perf_counter() < deadline or not times.gaps:
            live = {engine.submit(prompt, params) for prompt in load.prompts(options.streams)}
            while live:
                live -= {e.index for e in engine.step(live) if e.output is not None}
    return times.milliseconds


def first_token(engine: Engine, prompt: list[int], options: argparse.Namespace) -> float:
    begin = time.perf_counter()
    id = engine.submit(prompt, SamplingParams(max_tokens=options.tokens, ignore_eos=True))
    while not engine.step([id]):
        pass
    seconds = time.perf_counter() - begin
    engine.abort(id)
    return seconds


@contextlib.contextmanager
def serving(engine: Engine) -> Iterator[int]:
    """Runs a server of this engine in a thread of its own, and yields its port."""
    listening = bound_socket(HOST, 0)
    started: list[tuple[asyncio.AbstractEventLoop, Service]] = []
    ready, settings = threading.Event(), ServingOptions(max_queued_requests=10_000)
    make = lambda: Service(("bench",), settings, lambda: engine)

    def note(service: Service) -> None:
        started.append((asyncio.get_running_loop(), service))
        ready.set()

    # A daemon, so that an error ends the script. But a process must not end inside a step.
    server = threading.Thread(target=lambda: run(make, listening, note), daemon=True)
    server.start()
    ready.wait()
    yield listening.getsockname()[1]
    [(events, service)] = started
    asyncio.run_coroutine_threadsafe(service.drain(ENDING_SECONDS), events).result()
    server.join(ENDING_SECONDS)


def compared(run: Report) -> Report:
    """The figures for which there are bars, as far as their phases were measured."""
    found: Report = {"prefill_beside_decoding": run["prefill_beside_decoding"]}
    alone, server = run.get("in_process", {}), run.get("server", {})
    if "step_ms" in server:
        found["step_ratio"] = server["step_ms"]["p50"] / alone["step_ms"]["p50"]
    if "first_byte_ms" in server:
        later = server["first_byte_ms"]["p50"] - alone["first_token_ms"]["p50"]
        found["first_byte_later_ms"] = later
    if "gaps" in run:
        found["gap_p99_over_p50"] = run["gaps"]["p99"] / run["gaps"]["p50"]
    if "beside_a_long_prompt" in run:
        found["longest_gap_ms"] = run["beside_a_long_prompt"]["longest_gap_ms"]
    return found


def draw(path: str, runs: Sequence[Report]) -> None:
    figure, axes = pyplot().subplots(1, 2, figsize=(9, 3.4))
    titles = (("first_byte_ms", "Time to the first byte"), ("per_token_ms", "Time per token"))
    for axis, (name, title) in zip(axes, titles):
        for one in runs:
            rates = [row["arrivals_per_s"] for row in one["curve"]]
            for quantile in ("p50", "p95"):
                values = [row[name][quantile] for row in one["curve"]]
                label = f"{quantile}, {one['prefill_beside_decoding']} tokens beside"
                axis.plot(rates, values, marker="o", label=label)
        axis.set(title=title, xlabel="arrivals per second", ylabel="ms", ylim=(0, None))
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(cli.run(main))
