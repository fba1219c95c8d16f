"""Judges a small pair that writes Python: what it says after 64 held-out function headers.

    python scripts/judge_pair.py --text demo-text.tar.xz                       # the demo pair
    python scripts/judge_pair.py --text demo-text.tar.xz --target DIR --draft DIR --json FILE

The headers of demo_headers.json, each with an end of line, are continued greedily and at a
temperature, and the prompts of demo_typed.txt greedily. The report says whether the first 300
characters of each greedy continuation repeat themselves, and for a header whether the function
parses up to its end. The loss is per character of the archive's held-out documents, so that targets
with different vocabularies can be compared. Mean acceptance lengths are given over all steps, and
over the steps up to the function's end, because text that repeats itself raises those less.
"""

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from demo_archive import read_archive
from jaxtyping import Array, Float, Int
from judging import CHARACTERS, Verdict, judged, loops
from measure_held_out import engine_of
from measuring import about, write_json

from jaxspec import cli
from jaxspec.demo import demo_pair
from jaxspec.engine.requests.output import RequestOutput
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.engine.setup.load_models import open_models
from jaxspec.engine.setup.opened import Opened
from jaxspec.errors import LoadError
from jaxspec.measure.load import Load, Work, run_load
from jaxspec.models.parameters import Params
from jaxspec.models.targets import CheckpointTarget
from jaxspec.models.whole_sequences import causal_hidden
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.training.pretraining.corpus import Document
from jaxspec.training.scores import bound

HEADERS = Path(__file__).with_name("demo_headers.json")
TYPED = Path(__file__).with_name("demo_typed.txt")
"""Prompts like those that somebody types to try the pair, one per line. Of their continuations it
is only judged whether they repeat themselves."""
PAGE_SIZE = 64
PIECE = 1200
"""Characters of a held-out document that are read at once."""


def main() -> None:
    options = parse()
    with jax.default_matmul_precision("highest" if options.dtype == "float32" else None):
        report = judge(options)
    write_json(options.json, report)
    for name, value in report["greedy"].items():
        print(f"{name:<36}{value}")
    for name in "sampled", "loss_per_character":
        print(f"{name:<36}{report.get(name)}")


def judge(options: argparse.Namespace) -> dict[str, Any]:
    opened = open_models(options.target, options.draft, dtype=options.dtype)
    assert opened.tokenizer is not None, "models from a folder come with a tokenizer"
    headers = [row["header"] for row in json.loads(HEADERS.read_text())][: options.headers]
    typed = TYPED.read_text().splitlines()[: options.typed]
    prompts = [*(header + "\n" for header in headers), *typed]
    greedy = continued(options, opened, prompts, temperature=0.0)
    drawn = continued(options, opened, prompts[: len(headers)], options.temperature)
    of_headers, of_typed = greedy[: len(headers)], greedy[len(headers) :]
    verdicts = [
        judged(header, one.text, one.finish_reason == "stop")
        for header, one in zip(headers, of_headers)
    ]
    sampled = lengths(drawn, [None] * len(drawn), opened.tokenizer)
    report: dict[str, Any] = {
        **about(),
        "parameters": sum(x.size for x in jax.tree.leaves(opened.params["target"])),
        "dtype": options.dtype,
        "tokens": options.tokens,
        "greedy": {**shares(verdicts), **lengths(of_headers, verdicts, opened.tokenizer)},
        "sampled": {"temperature": options.temperature, **sampled},
    }
    if options.text is not None:
        report["loss_per_character"] = losses(options, opened)
    rows = zip(headers, of_headers, verdicts)
    report["continuations"] = [continuation(*row) for row in rows]
    report["typed"] = [typed_row(*row) for row in zip(typed, of_typed)]
    report["greedy"]["typed"] = len(typed)
    report["greedy"]["typed_loop"] = share_of(row["loops"] for row in report["typed"])
    show(report, options.show)
    return report


def continued(
    options: argparse.Namespace, opened: Opened, prompts: Sequence[str], temperature: float
) -> tuple[RequestOutput, ...]:
    """Continues prompts with drafts. In float32, greedy outputs equal those of the target alone."""
    assert opened.tokenizer is not None
    encoded = [opened.tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]
    prompt_lengths = sorted({len(ids) for ids in encoded})
    engine = engine_of(
        opened, options.method, [options.batch], prompt_lengths, options.tokens, PAGE_SIZE
    )
    work = [
        Work(tuple(ids), SamplingParams(options.tokens, temperature=temperature, seed=seed))
        for seed, ids in enumerate(encoded)
    ]
    return run_load(engine, work, Load(options.batch)).outputs


def shares(verdicts: Sequence[Verdict]) -> dict[str, float]:
    def share(name: str) -> float:
        return share_of(getattr(verdict, name) for verdict in verdicts)

    return {
        "headers": len(verdicts),
        "parse": share("parses"),
        "parse_or_begin_python": share("sound"),
        "end_and_parse": share_of(verdict.ended and verdict.parses for verdict in verdicts),
        "loop": share("loops"),
    }


def share_of(verdicts: Iterable[bool]) -> float:
    return round(statistics.mean(verdicts), 3)


def lengths(
    outputs: Sequence[RequestOutput], verdicts: Sequence[Verdict | None], tokenizer: Tokenizer
) -> dict[str, float]:
    """Mean tokens per verified step, the bonus token included."""
    every = [x for one in outputs for x in one.stats.acceptance_lengths]
    result = {"acceptance_length": round(statistics.mean(every), 3)}
    inside = [
        x
        for one, verdict in zip(outputs, verdicts)
        if verdict is not None
        for x in steps_within(one, len(verdict.body), tokenizer)
    ]
    if inside:
        result["acceptance_length_within_function"] = round(statistics.mean(inside), 3)
    return result


def steps_within(one: RequestOutput, characters: int, tokenizer: Tokenizer) -> list[int]:
    """The lengths of the steps that begin within the first `characters` characters."""
    inside, tokens = [], 1
    for length in one.stats.acceptance_lengths:
        if len(tokenizer.decode(one.token_ids[:tokens])) >= characters:
            break
        inside.append(length)
        tokens += length
    return inside


def losses(options: argparse.Namespace, opened: Opened) -> dict[str, float]:
    """The loss on the held-out documents of each package, in nats per character."""
    packages: dict[str, list[Document]] = {}
    for path, text in read_archive(options.text).held_out:
        packages.setdefault(path.parts[0], []).append((path, text))
    return {
        name: round(loss_per_character(opened, documents, options.pieces), 4)
        for name, documents in packages.items()
    }


def loss_per_character(opened: Opened, documents: Sequence[Document], most: int) -> float:
    """The loss over at most `most` pieces, spread evenly, each read without earlier text."""
    tokenizer, target = opened.tokenizer, opened.models.target
    assert tokenizer is not None and isinstance(target, CheckpointTarget)
    pieces = [
        text[i : i + PIECE] for _, text in documents for i in range(0, len(text) - PIECE + 1, PIECE)
    ]
    if not pieces:
        raise LoadError(
            f"no held-out document of {documents[0][0].parts[0]} has {PIECE} characters"
        )
    order = np.random.default_rng(0).permutation(len(pieces))[:most]
    chosen = [pieces[i] for i in order]
    (end,) = target.config.eos_token_ids
    rows = [[end, *tokenizer.encode(text, add_special_tokens=False)] for text in chosen]
    width = max(map(len, rows))
    total = 0.0
    for row in rows:
        tokens = np.full((1, width), end, np.int32)
        tokens[0, : len(row)] = row
        found = log_probabilities(target, opened.params["target"], tokens)
        total -= float(jnp.sum(found[0, : len(row) - 1]))
    return total / (PIECE * len(chosen))


@functools.partial(jax.jit, static_argnums=0)
def log_probabilities(
    target: CheckpointTarget, params: Params, tokens: Int[Array, "batch length"]
) -> Float[Array, "batch length-1"]:
    """The log probability of every token but the first, given those before it."""
    model = bound(target, params)
    hidden, _ = causal_hidden(model, tokens)
    all_of_them = jax.nn.log_softmax(model.logits(hidden[:, :-1]).astype(jnp.float32))
    return jnp.take_along_axis(all_of_them, tokens[:, 1:, None], axis=-1)[..., 0]


def continuation(header: str, one: RequestOutput, verdict: Verdict) -> dict[str, Any]:
    return {
        "header": header,
        "text": one.text,
        "parses": verdict.parses,
        "loops": verdict.loops,
        "acceptance_length": round(one.stats.mean_acceptance_length, 2),
    }


def typed_row(prompt: str, one: RequestOutput) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "text": one.text,
        "loops": loops(one.text[:CHARACTERS]),
        "acceptance_length": round(one.stats.mean_acceptance_length, 2),
    }


def show(report: dict[str, Any], count: int) -> None:
    for row in report["typed"][:count]:
        print(f"--- {row['prompt']}>>>{row['text']}")
    for row in report["continuations"][:: max(len(report["continuations"]) // max(count, 1), 1)]:
        print(f"--- parses {row['parses']}, loops {row['loops']}\n{row['header']}\n{row['text']}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    target, draft = demo_pair()
    parser.add_argument("--target", type=Path, default=target, metavar="DIR")
    parser.add_argument("--draft", type=Path, default=draft, metavar="DIR")
    parser.add_argument("--text", type=Path, metavar="ARCHIVE", help="[no loss is measured]")
    parser.add_argument("--method", default="dflash")
    parser.add_argument("--temperature", type=float, default=0.8, help="of the sampled text")
    parser.add_argument("--headers", type=int, default=64)
    parser.add_argument("--typed", type=int, metavar="COUNT", help="of demo_typed.txt [all]")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--pieces", type=int, default=100, help="of each held-out package")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--show", type=int, default=4, help="continuations that are printed")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(cli.run(main))
