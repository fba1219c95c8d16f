"""Measures a pair on held-out files: acceptance, equality with plain decoding, speedup.

    python scripts/measure_held_out.py --text FOLDER                             # the demo pair
    python scripts/measure_held_out.py --text FOLDER --target DIR --draft DIR

Every file of demo_held_out.txt that the folder has gives one prompt: `--prompt-tokens` tokens
from the start of the first line after a third of the file. Each is continued by `--tokens` tokens,
greedily or at `--temperature`. Every program is compiled and run before the clock starts, and of
`--passes` passes the fastest counts.

In float32, with matrix products in full float32, greedy tokens must equal those of plain decoding.
In bfloat16, steps of different shapes round differently, and the report counts the equal streams.
Sampled streams are not compared: drafts are drawn too, so the same seed gives other tokens.
"""

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from measuring import about, write_json

from jaxspec import cli
from jaxspec.demo import demo_pair
from jaxspec.engine.engine import Engine
from jaxspec.engine.requests.output import RequestOutput
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.engine.setup.load_models import open_models
from jaxspec.engine.setup.opened import Opened
from jaxspec.errors import LoadError
from jaxspec.measure.engines import compile_all, engine_for
from jaxspec.measure.load import Load, Run, Work, run_load
from jaxspec.text.tokenizer import Tokenizer

HELD_OUT = Path(__file__).with_name("demo_held_out.txt")


def main() -> None:
    options = parse()
    # XLA would multiply float32 in TF32, whose rounding makes greedy streams differ at near ties.
    with jax.default_matmul_precision("highest" if options.dtype == "float32" else None):
        measure(options)


def measure(options: argparse.Namespace) -> None:
    opened = open_models(options.target, options.draft, dtype=options.dtype)
    assert opened.tokenizer is not None, "models from a folder come with a tokenizer"
    works = works_of(options, opened.tokenizer)
    sizes = options.batch, [options.prompt_tokens], options.tokens, options.page_size
    engines = [engine_of(opened, method, *sizes) for method in ("none", options.method)]
    compile_all(engines, draws=options.temperature > 0)
    report: dict[str, Any] = {
        **about(),
        "dtype": options.dtype,
        "method": options.method,
        "temperature": options.temperature,
        "tokens": options.tokens,
        "passes": options.passes,
    }
    for batch in options.batch:
        plain, drafted = fastest(engines, works, batch, options.passes)
        report[f"batch {batch}"] = compared(plain, drafted, greedy=options.temperature == 0)
        show(f"batch {batch}", report[f"batch {batch}"])
        write_json(options.json, report)


def engine_of(
    opened: Opened,
    method: str,
    batches: Sequence[int],
    prompt_lengths: Sequence[int],
    tokens: int,
    page_size: int,
) -> Engine:
    """An engine with programs for these batch sizes and prompts only, and with room for `tokens`
    tokens after each prompt."""
    longest = max(prompt_lengths)
    block = opened.models.proposers[0].num_drafts + 1
    pages = -(-(longest + tokens + block) // page_size)
    return engine_for(
        opened,
        method,
        batches,
        prompt_lengths,
        max_batch=max(batches),
        max_model_len=longest + tokens,
        page_size=page_size,
        num_pages=pages * max(batches),
        prefill_chunk=longest,
    )


def fastest(engines: list[Engine], works: list[Work], batch: int, passes: int) -> list[Run]:
    """The fastest of several passes of each engine; the engines take turns."""
    for engine in engines:
        run_load(engine, works[: 2 * batch], Load(batch))
    runs = [[run_load(engine, works, Load(batch)) for engine in engines] for _ in range(passes)]
    return [min(runs_of_one, key=lambda run: run.seconds) for runs_of_one in zip(*runs)]


def compared(plain: Run, drafted: Run, greedy: bool) -> dict[str, Any]:
    rates = [sum(len(o.token_ids) for o in run.outputs) / run.seconds for run in (plain, drafted)]
    pairs = zip(plain.outputs, drafted.outputs, strict=True)
    equal = sum(a.token_ids == b.token_ids for a, b in pairs)
    return {
        **acceptance(drafted.outputs),
        "streams_equal_to_plain": equal if greedy else None,
        "plain_tokens_per_second": round(rates[0], 1),
        "drafted_tokens_per_second": round(rates[1], 1),
        "speedup": round(rates[1] / rates[0], 3),
        "plain_step_ms": median_ms(plain),
        "drafted_step_ms": median_ms(drafted),
    }


def median_ms(run: Run) -> float | None:
    """Median over the steps in which every slot was decoding."""
    return round(1e3 * statistics.median(run.step_s), 3) if run.step_s else None


def works_of(options: argparse.Namespace, tokenizer: Tokenizer) -> list[Work]:
    """One request for every held-out file that the folder has."""
    params = SamplingParams(
        max_tokens=options.tokens, ignore_eos=True, temperature=options.temperature
    )
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
        raise LoadError(f"no file of {HELD_OUT.name} in {options.text}")
    chosen = enumerate(prompts[: options.prompts])
    return [Work(prompt, dataclasses.replace(params, seed=seed)) for seed, prompt in chosen]


def acceptance(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Mean acceptance length over the requests' means and over all steps with drafts.

    `tokens_per_step` is over all steps, and counts no tokens beyond a request's budget.
    """
    lengths = [length for one in outputs for length in one.stats.acceptance_lengths]
    means = [one.stats.mean_acceptance_length for one in outputs]
    decoded = sum(len(one.token_ids) - 1 for one in outputs)
    plain_steps = max(decoded - sum(lengths), 0)
    quartiles = statistics.quantiles(means) if len(means) > 1 else means * 3
    positions = np.sum([one.stats.accepted_per_position for one in outputs], axis=0)
    return {
        "prompts": len(outputs),
        "acceptance_length": round(statistics.mean(means), 3),
        "acceptance_length_quartiles": [round(x, 3) for x in quartiles],
        "acceptance_length_over_steps": round(statistics.mean(lengths), 3),
        "tokens_per_step": round(decoded / (len(lengths) + plain_steps), 3),
        "accepted_per_place": [round(float(count) / len(lengths), 3) for count in positions],
    }


def show(title: str, result: dict[str, Any]) -> None:
    print(title)
    for name, value in result.items():
        print(f"  {name:<30}{value}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    target, draft = demo_pair()
    parser.add_argument("--target", type=Path, default=target, metavar="DIR")
    parser.add_argument("--draft", type=Path, default=draft, metavar="DIR")
    parser.add_argument("--text", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--method", default="dflash", help="or ngram, for prompt lookup")
    parser.add_argument("--temperature", type=float, default=0.0)
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
    sys.exit(cli.run(main))
