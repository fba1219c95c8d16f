"""CPU time of the host per token and per step, on a device that answers at once. Needs no GPU.

    python scripts/bench_host.py --json host.json

The first table is `emit`, which adds a step's tokens to one request. The second is a whole warm
decode step of the overlapped driver, from launching programs to the events that the caller gets.
The programs of the device are replaced by a function that returns finished results, so that the
step waits for nothing. Each figure is CPU time of the thread, the least of several repetitions.
"""

import argparse
import pathlib
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from measuring import about, write_json

import jaxspec
from jaxspec import cli
from jaxspec.engine.engine import Engine
from jaxspec.engine.event_stream import StreamEvent
from jaxspec.engine.requests.advance import emit
from jaxspec.engine.requests.request import NewTokens, Request
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.engine.step.compiled import Programs, program_key
from jaxspec.engine.step.io import Models, StepResult
from jaxspec.layers.decoder import BlockMask, Decoder
from jaxspec.layers.rope import Rope
from jaxspec.models.config import DFlashConfig, Qwen3Config
from jaxspec.models.dflash import DFlash
from jaxspec.models.parameters import random_params
from jaxspec.models.qwen3 import Qwen3
from jaxspec.proposers.dflash import DFlashProposer
from jaxspec.text.stream import TextStream, stop_scan
from jaxspec.text.tokenizer import Tokenizer, open_tokenizer

CONTEXT = 16_000
VOCAB, DRAFTS = 512, 15
EMITTED = 4
"""Tokens that every request gets from a step."""
REPEATS = 7
STOPS = ("\n\n\n", "</answer>")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens-out", type=int, nargs="+", default=[0, 8000])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    tokenizer = open_tokenizer(jaxspec.demo_pair()[0])
    report: dict[str, Any] = {
        **about(),
        "processor": processor(),
        "python": platform.python_version(),
        "emit": list(emit_rows(options, tokenizer)),
        "step": list(step_rows(options, tokenizer)),
    }
    write_json(options.json, report)


def emit_rows(options: argparse.Namespace, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    print("emit: tokens out, tokens per step, stop strings: us of CPU per token")
    for out in options.tokens_out:
        for per_step, stops in ((1, ()), (EMITTED, ()), (EMITTED, STOPS)):
            us = 1e6 * seconds_of_emit(tokenizer, out, per_step, stops) / per_step
            row = {"tokens_out": out, "per_step": per_step, "stops": len(stops), "us": us}
            print(f"{out:6} {per_step:3} {len(stops):3} {us:8.2f}")
            yield row


def seconds_of_emit(tokenizer: Tokenizer, out: int, per_step: int, stops: tuple[str, ...]) -> float:
    params = SamplingParams(max_tokens=CONTEXT, stop=stops, ignore_eos=True)
    request = Request(
        id=1,
        prompt=(5,) * 100,
        params=params,
        stop_ids=frozenset([VOCAB]),
        seed=0,
        stream=TextStream(),
        scan=stop_scan(stops),
        submitted_at=0.0,
    )
    steps = list(tokens_of_steps(per_step))
    for at in range(out // per_step):
        request, _ = emit(request, steps[at % len(steps)], tokenizer)

    def some_steps() -> None:
        one = request
        for new in steps:
            one, _ = emit(one, new, tokenizer)

    return least(some_steps) / len(steps)


def tokens_of_steps(per_step: int) -> Iterator[NewTokens]:
    random = np.random.default_rng(0)
    for _ in range(100):
        tokens = random.integers(10, 500, per_step).tolist()
        yield NewTokens(tokens, per_step, [], 1.0)


def step_rows(options: argparse.Namespace, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    print(f"step: requests, tokens out: us of CPU per step, and per request ({EMITTED} tokens)")
    for requests in options.requests:
        for out in options.tokens_out:
            us = 1e6 * seconds_of_step(tokenizer, requests, out)
            print(f"{requests:3} {out:6} {us:9.1f} {us / requests:8.1f}")
            yield {"requests": requests, "tokens_out": out, "us": us}


def seconds_of_step(tokenizer: Tokenizer, requests: int, out: int) -> float:
    with instant_engine(tokenizer, requests) as engine:
        params = SamplingParams(max_tokens=CONTEXT - 200, ignore_eos=True)
        ids = [engine.submit([5 + i] * 100, params) for i in range(requests)]
        while engine.num_decoding < requests:
            refuse_ends(engine.step(ids))
        for _ in range(out // EMITTED):
            refuse_ends(engine.step(ids))
        seconds = least(lambda: [engine.step(ids) for _ in range(10)]) / 10
        if engine.num_decoding < requests:
            raise SystemExit("requests ended while steps were measured")
        return seconds


def refuse_ends(events: Iterable[StreamEvent]) -> None:
    """Ends the script if a request has ended, which would never be decoding."""
    for event in events:
        if event.output is not None:
            raise SystemExit(f"a request ended before the measurement: {event.output}")


def instant_engine(tokenizer: Tokenizer, requests: int) -> Engine:
    """An engine whose programs are replaced by a function that returns finished results."""
    decoder = Decoder(8, 8, 1, 2, 1, 4, 1e-6, Rope(theta=1e4), 2 * CONTEXT)
    target = Qwen3(Qwen3Config(decoder, VOCAB, True), capture=(0,))
    layout = DFlashConfig(decoder, DRAFTS + 1, VOCAB - 1, (0,), VOCAB, (BlockMask(causal=False),))
    params = {
        "target": random_params(target, jax.random.key(0)),
        "drafter": random_params(DFlash(layout), jax.random.key(1)),
    }
    engine = Engine.from_models(
        Models(target, (DFlashProposer(DFlash(layout)),)),
        params,
        tokenizer,
        method="dflash",
        driver="overlapped",
        max_batch=requests,
        max_model_len=CONTEXT,
        page_size=64,
        batch_sizes=(requests,),
        compile_ahead=False,
    )
    vars(engine.loop.device)["programs"] = Instant(engine.loop.device.programs)
    return engine


class Instant(Programs):
    """Programs that return the state that they are given, and a finished result."""

    def __init__(self, real: Programs):
        vars(self).update(vars(real))
        random = np.random.default_rng(0)
        self.tokens = random.integers(10, 500, (256, 64)).astype(np.int32)
        self.results: dict[Any, Any] = {}

    def ready(
        self, step: Callable[..., Any], inputs: tuple[Any, ...], static: dict[str, Any]
    ) -> Any:
        key = program_key(step, inputs, static)
        if key not in self.results:
            self.results[key] = self.result_of(step, inputs, static)
        return lambda params, state, *inputs: (state, self.results[key])

    def result_of(
        self, step: Callable[..., Any], inputs: tuple[Any, ...], static: dict[str, Any]
    ) -> StepResult | None:
        if step.__name__ == "admit_step":
            return None
        batch = len(inputs[0].integers if step.__name__ == "prefill_step" else inputs[0])
        drafting = static.get("drafting")
        width = drafting.width if drafting else 1
        emitted = np.full(batch, min(width, EMITTED), np.int32)
        drafts = np.full(batch, width - 1, np.int32)
        tokens = self.tokens[:batch, :width]
        tokens, emitted, drafts = jax.device_put((tokens, emitted, drafts))
        return StepResult(tokens, emitted, drafts, None)


def least(action: Callable[[], Any]) -> float:
    """CPU seconds of this thread for the action, the least of several repetitions."""
    seconds = []
    for _ in range(REPEATS):
        begin = time.thread_time()
        action()
        seconds.append(time.thread_time() - begin)
    return min(seconds)


def processor() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    sys.exit(cli.run(main))
