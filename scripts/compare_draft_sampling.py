"""How much more rejection sampling accepts than sample-and-match, for requests that sample.

    python scripts/compare_draft_sampling.py --target DIR --draft DIR --json sampling.json

Both are lossless. Rejection sampling draws its drafts as the request asks and keeps each with
probability min(1, p / q). Sample-and-match takes the likeliest drafts and keeps those that the
target draws too. Prompts are the beginnings of this package's own source files, and every prompt is
continued with several seeds. The report has the difference of the mean acceptance lengths, with an
interval from resampled prompts.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from measuring import about, write_json

import jaxspec
from jaxspec import cli
from jaxspec.engine.requests.output import RequestOutput
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.proposers.options import DraftSampling

RULES: dict[str, DraftSampling] = {
    "rejection sampling": "drawn",
    "sample and match": "likeliest",
}
RESAMPLED = 2000


def main() -> None:
    options = parse()
    params = [
        SamplingParams(
            options.tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            seed=seed,
            ignore_eos=True,
        )
        for seed in range(options.seeds)
    ]
    report: dict[str, Any] = {
        **about(),
        "temperature": options.temperature,
        "top_p": options.top_p,
        "rules": {},
    }
    counts = []
    for rule, draft_sampling in RULES.items():
        engine = jaxspec.Engine.from_pretrained(
            options.target,
            options.draft,
            method="dflash",
            dtype=options.dtype,
            max_batch=options.batch,
            max_model_len=options.prompt + options.tokens,
            draft_sampling=draft_sampling,
            prefix_caching=False,
            compile_ahead=False,
        )
        prompts = prompts_of(engine, options)
        outputs = engine.generate(
            [prompt for prompt in prompts for _ in params], params * len(prompts)
        )
        counts.append(counts_of(outputs, len(params)))
        report["rules"][rule] = summary(outputs)
        print(f"{rule:<20}{report['rules'][rule]}")
    report["difference"] = difference(*counts)
    print(f"{'difference':<20}{report['difference']}")
    write_json(options.json, report)
    if report["difference"]["low"] <= 0:
        sys.exit("rejection sampling is not clearly above sample and match")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=48, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--json", help="file for the figures")
    return parser.parse_args()


def prompts_of(engine: jaxspec.Engine, options: argparse.Namespace) -> list[list[int]]:
    """The beginnings of this package's longest files, which are in none of our training texts."""
    assert engine.tokenizer is not None, f"{options.target} has no tokenizer"
    encode = engine.tokenizer.encode
    files = sorted(Path(jaxspec.__file__).parent.rglob("*.py"), key=lambda f: -f.stat().st_size)
    texts = [file.read_text() for file in files[: options.prompts]]
    return [encode(text, add_special_tokens=True)[: options.prompt] for text in texts]


def counts_of(outputs: Sequence[RequestOutput], seeds: int) -> np.ndarray:
    """Accepted drafts and steps of every prompt, over its seeds."""
    stats = [output.stats for output in outputs]
    counts = np.array([(s.num_accepted_draft_tokens, s.num_spec_steps) for s in stats])
    return counts.reshape(-1, seeds, 2).sum(axis=1)


def summary(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    accepted, steps = counts_of(outputs, 1).sum(axis=0)
    drafted = sum(output.stats.num_draft_tokens for output in outputs)
    return {
        "mean_acceptance_length": round(1 + float(accepted / steps), 3),
        "draft_acceptance_rate": round(float(accepted / drafted), 3),
        "steps": int(steps),
    }


def difference(ours: np.ndarray, theirs: np.ndarray) -> dict[str, float]:
    """Difference of the mean lengths, with its 95 % interval over resampled prompts."""
    picks = np.random.default_rng(0).integers(0, len(ours), (RESAMPLED, len(ours)))
    lengths = lambda counts: counts[..., 0].sum(-1) / counts[..., 1].sum(-1)
    resampled = lengths(ours[picks]) - lengths(theirs[picks])
    low, high = np.percentile(resampled, [2.5, 97.5])
    mean = float(lengths(ours) - lengths(theirs))
    return {"mean": round(mean, 3), "low": round(float(low), 3), "high": round(float(high), 3)}


if __name__ == "__main__":
    sys.exit(cli.run(main))
