"""Measures a pair on held-out files: accepted lengths, equality with plain decoding, speedup.

    python scripts/measure_held_out.py --target DIR --draft DIR --text FOLDER

Prompts are `--prompt-tokens` tokens from the start of a line a third into every file of
demo_held_out.txt that the folder has; greedy, `--tokens` tokens. Both methods run the same
engine, and once before the clock starts. With float32 tokens must be equal to plain decoding; in
bfloat16 other shapes round differently, and streams that part are counted.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from measuring import write_json

from jaxspec.engine.engine import Engine
from jaxspec.engine.output import RequestOutput
from jaxspec.engine.params import SamplingParams
from jaxspec.measure.environment import environment

HELD_OUT = Path(__file__).with_name("demo_held_out.txt")


def main() -> None:
    options = parse()
    report: dict[str, Any] = {"environment": environment(), "dtype": options.dtype}
    for batch in options.batch:
        plain, plain_rate = run(options, "none", batch)
        drafted, rate = run(options, "dflash", batch)
        report[f"batch {batch}"] = {
            **acceptance(drafted),
            "streams_equal_to_plain": sum(
                a.token_ids == b.token_ids for a, b in zip(plain, drafted)
            ),
            "plain_tokens_per_second": round(plain_rate, 1),
            "drafted_tokens_per_second": round(rate, 1),
            "speedup": round(rate / plain_rate, 3),
        }
        show(f"batch {batch}", report[f"batch {batch}"])
    write_json(options.json, report)


def run(options: argparse.Namespace, method: str, batch: int) -> tuple[list[RequestOutput], float]:
    """Outputs, and tokens per second of the whole run."""
    engine = Engine.from_pretrained(
        options.target,
        options.draft,
        method=method,
        dtype=options.dtype,
        max_batch=batch,
        max_model_len=options.prompt_tokens + options.tokens,
        page_size=options.page_size,
    )
    prompts = prompts_of(options, engine)
    params = SamplingParams(max_tokens=options.tokens, ignore_eos=True)
    engine.generate(prompts[:batch], params)
    begin = time.perf_counter()
    outputs = engine.generate(prompts, params)
    seconds = time.perf_counter() - begin
    return outputs, sum(len(one.token_ids) for one in outputs) / seconds


def prompts_of(options: argparse.Namespace, engine: Engine) -> list[tuple[int, ...]]:
    prompts = []
    for name in HELD_OUT.read_text().split():
        path = options.text / name
        if not path.is_file():
            continue
        text = path.read_text(encoding="utf-8")
        start = text.find("\n", len(text) // 3) + 1
        ids = engine.tokenizer.encode(text[start:], add_special_tokens=False)
        prompts.append(tuple(ids[: options.prompt_tokens]))
    if not prompts:
        raise SystemExit(f"no file of {HELD_OUT.name} in {options.text}")
    return prompts[: options.prompts]


def acceptance(outputs: list[RequestOutput]) -> dict[str, Any]:
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
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
