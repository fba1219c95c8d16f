"""How much slower steps are while other programs are compiled, and whether those are as fast.

    python scripts/bench_ahead.py --model qwen3-8b --json ahead.json

A pair with random weights answers one request after the other. First an engine begins with only the
programs of one request and compiles all others in the background (`compile_ahead`); the time of
every step is noted until that is done, and for a while afterwards. Then steps are timed at every
batch size, when no step waits for a program any more. Last, an engine that compiled everything
beforehand, with another cache folder, is timed at the same batch sizes.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from measuring import about, tell, write_json

from jaxspec import cli
from jaxspec.engine.engine import Engine
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.engine.setup.opened import Opened
from jaxspec.engine.step import compiled
from jaxspec.measure.engines import random_pair

PROMPT = list(range(100, 164))
UNTIMED = 8
"""Steps at the beginning of a request, in which its prompt is read."""


def main() -> None:
    options = parse()
    begin, pair = time.perf_counter(), random_pair(options.model, 16, jnp.dtype(options.dtype))
    report: dict[str, Any] = about() | {"model": options.model, "slots": options.slots}
    tell("weights made", begin)
    with build(options, pair, ahead=True) as engine:
        report["one_request"] = beside(engine, options)
        tell("programs made ahead", begin)
        before = engine.loop.device.clock.waits.count
        made_ahead = by_batch(engine, options)
        report["waits_for_programs"] = engine.loop.device.clock.waits.count - before
    compiled._SHARED.clear()
    jax.clear_caches()
    with build(options, pair, ahead=False) as engine:
        engine.warm_up()
        tell("programs made beforehand", begin)
        beforehand = by_batch(engine, options)
    report["step_ms"] = {
        size: {"made ahead": made_ahead[size], "made beforehand": beforehand[size]}
        for size in made_ahead
    }
    print({name: report[name] for name in ("one_request", "waits_for_programs", "step_ms")})
    write_json(options.json, report)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512, help="of each request")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--json", help="file for the figures")
    return parser.parse_args()


def build(options: argparse.Namespace, pair: Opened, ahead: bool) -> Engine:
    return Engine.from_models(
        pair.models,
        pair.params,
        max_batch=options.slots,
        max_model_len=options.max_model_len,
        prefix_caching=False,
        driver="overlapped",
        compile_ahead=ahead,
        cache_dir=tempfile.mkdtemp(prefix="jaxspec-ahead-"),
    )


def beside(engine: Engine, options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of one request's steps while other programs are compiled, and afterwards."""
    is_at_work = lambda: engine.is_compiling_ahead
    programs, steps = engine.loop.device.programs, []
    first = engine.warm_up([PROMPT], max_tokens=options.tokens)
    begin = time.perf_counter()
    while not steps or is_at_work():
        steps += step_times(engine, 1, options.tokens, is_at_work)
    seconds = time.perf_counter() - begin
    after = step_times(engine, 1, options.tokens)
    return {
        "seconds": seconds,
        "programs": len(programs._ready) - first,
        "beside_ms": quantiles(steps),
        "afterwards_ms": quantiles(after),
    }


def by_batch(engine: Engine, options: argparse.Namespace) -> dict[int, float]:
    """Median milliseconds of a step at every batch size."""
    sizes = engine.plan.shapes.batch_sizes
    return {size: statistics.median(step_times(engine, size, options.tokens)) for size in sizes}


def step_times(
    engine: Engine, requests: int, tokens: int, goes_on: Callable[[], bool] = lambda: True
) -> list[float]:
    """Milliseconds of each step in which `requests` requests decode."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    ids = engine.submit_all([PROMPT] * requests, params)
    times = [time.perf_counter()]
    all_run = lambda: engine.num_running + engine.num_waiting == requests
    while all_run() and (goes_on() or len(times) < 2 * UNTIMED):
        engine.step(ids)
        times.append(time.perf_counter())
    engine.abort(ids)
    engine.step(ids)
    return [1e3 * (end - begin) for begin, end in zip(times, times[1:])][UNTIMED:]


def quantiles(times: list[float]) -> dict[str, float]:
    shares = {"median": 0.5, "p90": 0.9, "p99": 0.99, "most": 1.0}
    return {"steps": len(times)} | {
        name: float(np.quantile(times, share)) for name, share in shares.items()
    }


if __name__ == "__main__":
    sys.exit(cli.run(main))
