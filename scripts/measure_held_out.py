"""Measures a pair on held-out files: accepted lengths, equality with plain decoding, speedup.

    python scripts/measure_held_out.py --target DIR --draft DIR --text FOLDER

Prompts are `--prompt-tokens` tokens from the start of a line a third into every file of
demo_held_out.txt that the folder has; greedy, `--tokens` tokens. Every program is compiled and
every pass made once before the clock starts. In float32, with products in full float32, tokens must
be equal to plain decoding; in bfloat16 other shapes round differently, and streams that part are
counted.
"""

import argparse
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from measuring import write_json

from jaxspec.engine.engine import Engine
from jaxspec.engine.opening import Opened, choose_dtype, open_models
from jaxspec.engine.output import RequestOutput
from jaxspec.engine.params import SamplingParams
from jaxspec.engine.warmup import every_program
from jaxspec.measure.contenders import engine_for
from jaxspec.measure.environment import environment
from jaxspec.measure.load import Load, Run, Work, run_load
from jaxspec.text.tokenizer import Tokenizer

HELD_OUT = Path(__file__).with_name("demo_held_out.txt")


METHODS = ("none", "dflash")


def main() -> None:
    options = parse()
    # XLA would take float32 products in TF32, whose rounding parts streams at near ties.
    jax.config.update(
        "jax_default_matmul_precision", "highest" if options.dtype == "float32" else None
    )
    opened = open_models(
        options.target, options.draft, "auto", choose_dtype(options.dtype), None, None
    )
    works = works_of(options, opened.tokenizer)
    engines = {method: engine_of(options, opened, method) for method in METHODS}
    compile_together(list(engines.values()))
    report: dict[str, Any] = {"environment": environment(), "dtype": options.dtype}
    for batch in options.batch:
        plain, drafted = (
            fastest(engines[method], works, batch, options.passes) for method in METHODS
        )
        report[f"batch {batch}"] = compared(plain, drafted)
        show(f"batch {batch}", report[f"batch {batch}"])
        write_json(options.json, report)


def engine_of(options: argparse.Namespace, opened: Opened, method: str) -> Engine:
    """With programs for these batches alone."""
    length = options.prompt_tokens + options.tokens
    block = opened.models.drafter.config.block_size
    pages = -(-(length + block) // options.page_size)
    return engine_for(
        opened,
        method,
        options.batch,
        [options.prompt_tokens],
        max_batch=max(options.batch),
        max_model_len=length,
        page_size=options.page_size,
        num_pages=pages * max(options.batch),
        prefill_chunk=options.prompt_tokens,
    )


def compile_together(engines: list[Engine]) -> None:
    """A few programs at a time; most of compiling is done by one core each."""
    lowered = [
        engine.loop.device.lower(step, *inputs, **static)
        for engine in engines
        for step, inputs, static in every_program(engine.loop.device, engine.loop.plan, draws=False)
    ]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(jax.stages.Lowered.compile, lowered))


def fastest(engine: Engine, works: list[Work], batch: int, passes: int) -> Run:
    """Of several passes over the same requests, after one that is not counted."""
    run_load(engine, works[: 2 * batch], Load(batch))
    return min((run_load(engine, works, Load(batch)) for _ in range(passes)), key=seconds_of)


def seconds_of(run: Run) -> float:
    return run.seconds


def compared(plain: Run, drafted: Run) -> dict[str, Any]:
    rates = [sum(len(o.token_ids) for o in run.outputs) / run.seconds for run in (plain, drafted)]
    pairs = zip(plain.outputs, drafted.outputs, strict=True)
    return {
        **acceptance(drafted.outputs),
        "streams_equal_to_plain": sum(a.token_ids == b.token_ids for a, b in pairs),
        "plain_tokens_per_second": round(rates[0], 1),
        "drafted_tokens_per_second": round(rates[1], 1),
        "speedup": round(rates[1] / rates[0], 3),
        "plain_step_ms": median_ms(plain),
        "drafted_step_ms": median_ms(drafted),
    }


def median_ms(run: Run) -> float | None:
    """Of steps in which every slot was decoding."""
    return round(1e3 * statistics.median(run.step_s), 3) if run.step_s else None


def works_of(options: argparse.Namespace, tokenizer: Tokenizer) -> list[Work]:
    params = SamplingParams(max_tokens=options.tokens, ignore_eos=True)
    prompts = []
    for name in HELD_OUT.read_text().split():
        path = options.text / name
        if not path.is_file():
            continue
        text = path.read_text(encoding="utf-8")
        start = text.find("\n", len(text) // 3) + 1
        ids = tokenizer.encode(text[start:], add_special_tokens=False)
        prompts.append(tuple(ids[: options.prompt_tokens]))
    if not prompts:
        raise SystemExit(f"no file of {HELD_OUT.name} in {options.text}")
    return [Work(prompt, params) for prompt in prompts[: options.prompts]]


def acceptance(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Mean over requests of the requests' means, and over all steps; both count the bonus."""
    lengths = [length for one in outputs for length in one.stats.acceptance_lengths]
    places = np.sum([one.stats.accepted_per_position for one in outputs], axis=0)
    return {
        "prompts": len(outputs),
        "acceptance_length": round(
            statistics.mean(one.stats.mean_acceptance_length for one in outputs), 3
        ),
        "acceptance_length_over_steps": round(statistics.mean(lengths), 3),
        "accepted_per_place": [round(float(count) / len(lengths), 3) for count in places],
    }


def show(title: str, result: dict[str, Any]) -> None:
    print(title)
    for name, value in result.items():
        print(f"  {name:<30}{value}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", type=Path, required=True, metavar="DIR")
    parser.add_argument("--draft", type=Path, required=True, metavar="DIR")
    parser.add_argument("--text", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--passes", type=int, default=2, help="the fastest counts")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
