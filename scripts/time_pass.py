"""Where the time of a bench's pass goes: every program that the loop launches, and when it ended.

    python scripts/bench_steps.py --model qwen3-8b --prefill 8 2048 --json steps.json
    python scripts/time_pass.py --model qwen3-8b --prefill steps.json --json pass.json

A pass is that of `jaxspec bench`: as many requests at once as there are slots, and a new one when
one ends. Weights are random and acceptance is drawn. With several `--options`, engines with these
options run passes in turns; they share the programs.

A thread waits for the result of each program in turn, and notes when it is there. A program takes
from the end of the program before it, or from its launch if the device had nothing to do, to its
own end. The **ideal** is that of `simulate_load.py`: prompt tokens at the rate of a large prefill,
which `--prefill` gives, and the other tokens at the rate of this pass's steady steps.
"""

import argparse
import dataclasses
import json
import queue
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from measuring import about, tell, write_json

from jaxspec import cli
from jaxspec.engine.engine import Engine
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.engine.setup.opened import Opened
from jaxspec.engine.step.device import Device
from jaxspec.engine.step.mixed import mixed_step
from jaxspec.engine.step.observer import Step
from jaxspec.engine.step.steps import decode_step, prefill_step
from jaxspec.measure.engines import random_pair
from jaxspec.measure.load import Load, Run, Work, run_load
from jaxspec.models.shapes import NAMES

LONGEST, PAGES = 1024, 17
"""Tokens of a request at most, and the pages of such a request with a block beyond it."""
NAMED = {decode_step: "decode", prefill_step: "prefill", mixed_step: "mixed"}


@dataclasses.dataclass(frozen=True)
class Launched:
    """A program of the timeline; times are in seconds of one clock."""

    name: str
    launched: float
    ended: float


class Timeline:
    """Notes when programs were launched, and when their results were there."""

    def __init__(self, device: Device):
        self.device = device
        self.programs: list[Launched] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records all programs of the loop that run inside the block."""
        run, running = self.device.run, queue.SimpleQueue()
        watcher = threading.Thread(target=self._watch, args=(running,))

        def noted(step: Step, *inputs: Any, **static: Any) -> Any:
            result = run(step, *inputs, **static)
            if step in NAMED:
                running.put((named(step, inputs), time.perf_counter(), result))
            return result

        self.device.run = noted
        watcher.start()
        try:
            yield
        finally:
            del self.device.run
            running.put(None)
            watcher.join()

    def _watch(self, running: "queue.SimpleQueue[Any]") -> None:
        while (one := running.get()) is not None:
            name, launched, result = one
            jax.block_until_ready(result)
            self.programs.append(Launched(name, launched, time.perf_counter()))


def named(step: Step, inputs: tuple[Any, ...]) -> str:
    if step is prefill_step:
        return f"prefill {len(inputs[0].integers)} x {inputs[0].width}"
    return f"{NAMED[step]} {inputs[0].size}"


def durations(programs: list[Launched]) -> tuple[dict[str, list[float]], float]:
    """Milliseconds of every program by name, and of the gaps in which the device had none."""
    took, idle, free = defaultdict(list), 0.0, programs[0].launched
    for one in programs:
        idle += max(one.launched - free, 0.0)
        took[one.name].append(1e3 * (one.ended - max(one.launched, free)))
        free = one.ended
    return dict(took), 1e3 * idle


def main() -> None:
    options = parse()
    begin, pair = time.perf_counter(), random_pair(options.model, None, jnp.bfloat16)
    engines = [build(options, pair, changes) for changes in options.options]
    tell(f"weights and {sum(engine.warm_up() for engine in engines)} programs", begin)
    per_token = ms_per_prompt_token(options.prefill)
    variants = [{"options": changes, "passes": []} for changes in options.options]
    report = about() | {"model": options.model, "synthetic": True, "variants": variants}
    report["prompt_ms_per_token"] = per_token
    for number in range(options.passes):
        for engine, variant in zip(engines, variants, strict=True):
            variant["passes"].append(one_pass(options, engine, per_token))
        tell(f"pass {number + 1}", begin)
        write_json(options.json, report)  # so that a time limit leaves what was measured
    print("\n\n".join(map(table, variants)))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="qwen3-8b", choices=NAMES)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--output", type=int, default=192)
    parser.add_argument("--requests-per-slot", type=int, default=2)
    parser.add_argument("--acceptance-length", type=float, default=6.54)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--options", type=json.loads, nargs="+", default=[{}], metavar="JSON")
    parser.add_argument("--prefill", help="file of bench_steps.py with the time of a large prefill")
    parser.add_argument("--json", help="file for the figures")
    return parser.parse_args()


def build(options: argparse.Namespace, pair: Opened, changes: dict[str, Any]) -> Engine:
    """An engine without a prefix cache and without steps that read prompts beside decoding, which
    such a pass does not have: a free slot is always taken."""
    given: dict[str, Any] = {
        "method": "dflash",
        "driver": "overlapped",
        "adaptive": False,
        "max_batch": options.slots,
        "max_model_len": LONGEST,
        "synthetic_acceptance": options.acceptance_length,
        "prefix_caching": False,
        "prefill_beside_decoding": 0,
        "compile_ahead": False,
        "num_pages": options.slots * PAGES,
    }
    as_tuples = {name: _as_tuples(value) for name, value in changes.items()}
    return Engine.from_models(pair.models, pair.params, **given | as_tuples)


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def ms_per_prompt_token(file: str | None) -> float | None:
    if file is None:
        return None
    with open(file) as opened:
        prefill = json.load(opened)["prefill"]
    return prefill["ms"] / (prefill["slots"] * prefill["tokens"])


def one_pass(
    options: argparse.Namespace, engine: Engine, per_token: float | None
) -> dict[str, Any]:
    """Runs a pass, and adds up its programs."""
    timeline, work = Timeline(engine.loop.device), work_of(options, engine)
    with timeline.recording():
        run = run_load(engine, work, Load(options.slots))
    took, idle = durations(timeline.programs)
    programs = {
        name: {"count": len(all), "ms": statistics.median(all), "sum_ms": sum(all)}
        for name, all in sorted(took.items())
    }
    tokens = sum(output.stats.generation_tokens for output in run.outputs)
    figures = {"ms": 1e3 * run.seconds, "tokens_per_s": tokens / run.seconds}
    figures |= {"idle_ms": idle, "programs": programs}
    ideal = {} if per_token is None else ideal_of(options, run, per_token, programs)
    return figures | ideal


def work_of(options: argparse.Namespace, engine: Engine) -> list[Work]:
    """The bench's requests: one prompt per slot, repeated."""
    random, vocab_size = np.random.default_rng(0), engine.models.target.vocab_size
    prompts = random.integers(0, vocab_size, (options.slots, options.prompt)).tolist()
    work = [
        Work(tuple(prompt), SamplingParams(options.output, ignore_eos=True, seed=number))
        for number, prompt in enumerate(prompts)
    ]
    return work * options.requests_per_slot


def ideal_of(
    options: argparse.Namespace, run: Run, per_token: float, programs: dict[str, Any]
) -> dict[str, float]:
    stats, steady = [output.stats for output in run.outputs], programs[f"decode {options.slots}"]
    steps = sum(one.num_spec_steps for one in stats)
    drawn = 1 + sum(one.num_accepted_draft_tokens for one in stats) / steps
    reading = per_token * sum(one.prompt_tokens for one in stats)
    others = sum(one.generation_tokens for one in stats) - len(stats)
    decoding = others / (options.slots * drawn) * steady["ms"]
    return {
        "drawn_length": drawn,
        "ideal_reading_ms": reading,
        "ideal_decoding_ms": decoding,
        "share": (reading + decoding) / (1e3 * run.seconds),
    }


def table(variant: dict[str, Any]) -> str:
    """The pass that was neither the fastest nor the slowest."""
    passes = sorted(variant["passes"], key=lambda one: one["ms"])
    middle = passes[len(passes) // 2]
    speeds = ", ".join(f"{one['tokens_per_s']:.0f}" for one in variant["passes"])
    lines = [f"{json.dumps(variant['options'])}: {speeds} tokens/s, SYNTHETIC acceptance"]
    lines += [
        f"  {name:<16}{one['count']:>4} x {one['ms']:>7.2f} = {one['sum_ms']:>8.1f} ms"
        for name, one in middle["programs"].items()
    ]
    lines.append(f"  {'idle':<27} = {middle['idle_ms']:>8.1f} ms")
    lines.append(f"  {'all':<27} = {middle['ms']:>8.1f} ms")
    if "share" in middle:
        ideal = middle["ideal_reading_ms"], middle["ideal_decoding_ms"]
        lines.append(f"  ideal: reading {ideal[0]:.1f}, decoding {ideal[1]:.1f} ms")
        lines.append(f"  share of the ideal: {100 * middle['share']:.1f} %")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(cli.run(main))
