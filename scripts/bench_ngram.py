"""Prompt lookup against plain decoding: prose, text that repeats itself, and both in one batch.

    python scripts/bench_ngram.py --model qwen3-8b --json ngram.json

Weights are random, but the head gives every token one successor, and the layers add so little that
nothing else decides. So a step costs as much as ever, and there are texts of two kinds:

    repetitive   a loop of 32 tokens; after the first round, every lookup is right
    prose        never the same token twice, but the prompt holds three of ten tokens to come, each
                 followed by another token than in the text, so every lookup is wrong

Both methods decode the same requests in one engine, in turns. Plain requests opt out of drafting,
so the program of plain decoding runs. A window is a number of steps from the first tokens on, so it
includes the steps in which the engine finds out whether lookup pays. Every token is compared with
the successor that it must be.
"""

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from measuring import about, tell, write_json
from steady import step_until_all_decode

from jaxspec import cli
from jaxspec.engine.engine import Engine
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.engine.step.io import Models
from jaxspec.engine.step.observer import Step, StepObserver
from jaxspec.engine.step.steps import decode_step
from jaxspec.measure.compile_clock import CompileClock
from jaxspec.models.parameters import random_params
from jaxspec.models.presets import published
from jaxspec.models.shapes import NAMES
from jaxspec.models.targets import target_of
from jaxspec.proposers.device import Params

LOOP, LOOPS = 32, 32
"""Tokens of a loop, and the number of loops; the other tokens of the vocabulary are prose."""
MISLEADING = 0.3
"""Share of the prose to come that the prompt holds."""
QUIET = 2.0**-14
"""Factor on the outputs of the layers, so small that only the head decides."""
BAR = 0.98
"""The least speed, as a share of plain decoding's."""


@dataclass(frozen=True)
class Load:
    """Requests that decode at once."""

    prose: int
    repetitive: int

    def steps(self, options: argparse.Namespace) -> int:
        """Steps of a window. Fewer if text repeats itself: it grows fast, and with the keys and
        values that it adds every step becomes slower."""
        return max(options.steps // 4, 1) if self.repetitive else options.steps

    def __str__(self) -> str:
        kinds = {"prose": self.prose, "repetitive": self.repetitive}
        return " + ".join(f"{count} {kind}" for kind, count in kinds.items() if count)


@dataclass(frozen=True)
class Window:
    """The measurements of one window."""

    seconds: float
    tokens: dict[str, int]
    """By kind of text, the tokens of all its requests."""
    wide_steps: int
    """Steps that drafted."""


class WideSteps(StepObserver):
    """Counts decode steps that draft."""

    count = 0

    def program(self, step: Step, inputs: tuple[Any, ...], static: dict[str, Any]) -> None:
        self.count += step is decode_step and static["drafting"] is not None


def main() -> None:
    options = parse()
    report: dict[str, Any] = {
        **about(),
        "model": options.model,
        "num_drafts": options.num_drafts,
        "prompt_tokens": options.prompt,
        "steps": options.steps,
        "rows": [],
    }
    clock, begin = CompileClock(), time.perf_counter()
    engine = build(options)
    tell("weights and programs", begin)
    loads = [Load(c, 0) for c in options.concurrency] + [Load(0, c) for c in options.concurrency]
    loads += [Load(c // 2, c - c // 2) for c in options.concurrency if c > 1]
    for load in loads:
        in_turn(engine, load, 0, argparse.Namespace(**vars(options) | {"steps": 8}))
        windows = [in_turn(engine, load, turn, options) for turn in range(options.passes)]
        report["rows"].append(row_of(load, windows, options))
        tell(json.dumps(report["rows"][-1]), begin)
        report["seconds"] = time.perf_counter() - begin
        report["compile_s"] = clock.seconds
        write_json(options.json, report)  # so that a time limit leaves what was measured
    print(table(report["rows"]))
    slow = [row["load"] for row in report["rows"] if min(row["ratio"].values()) < BAR]
    sys.exit(f"more than 2 % below plain decoding: {', '.join(slow)}" if slow else None)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="qwen3-8b", choices=NAMES)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--num-drafts", type=int, default=7)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--steps", type=int, default=192, help="of a window")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--json", help="file for the figures")
    return parser.parse_args()


def build(options: argparse.Namespace) -> Engine:
    config = replace(published(options.model), tie_word_embeddings=False)
    if options.model == "tiny":
        config = replace(config, vocab_size=4096)
    model = target_of(config, (), jnp.bfloat16)
    params = {"target": with_successors(random_params(model, jax.random.key(0)))}
    most, page = max(options.concurrency), 64
    longest = options.prompt + most_tokens(options)
    engine = Engine.from_models(
        Models(model),
        jax.block_until_ready(params),
        method="ngram",
        num_drafts=options.num_drafts,
        max_batch=most,
        max_model_len=longest,
        page_size=page,
        num_pages=most * -(-(longest + 16) // page),
        prefill_chunk=options.prompt,
        batch_sizes=tuple(sorted(options.concurrency)),
        prefill_shapes=((min(4, most), options.prompt),),
        driver="overlapped",
        prefix_caching=False,
        compile_ahead=False,
    )
    engine.warm_up()
    return engine


def most_tokens(options: argparse.Namespace) -> int:
    """The most tokens that a request can be given in a window, and a few before it."""
    loads = Load(1, 0), Load(0, options.num_drafts + 1)
    return 32 + max(load.steps(options) * max(load.repetitive, 1) for load in loads)


def successors(vocabulary: int) -> np.ndarray:
    """The token after every token: loops first, then one ring of prose."""
    token = np.arange(vocabulary)
    in_loop = token // LOOP * LOOP + (token + 1) % LOOP
    in_prose = np.where(token + 1 < vocabulary, token + 1, LOOP * LOOPS)
    return np.where(token < LOOP * LOOPS, in_loop, in_prose)


def with_successors(params: Params) -> Params:
    """Parameters whose head answers the embedding of a token with the token's successor."""
    embedding = params["embedding"]["embedding"]
    before = np.argsort(successors(embedding.shape[0]))
    quieter = jax.jit(lambda leaf: leaf * QUIET)
    quiet = lambda path, leaf: quieter(leaf) if path[-2].key in ("out", "down") else leaf
    params = jax.tree_util.tree_map_with_path(quiet, params)
    of_head = jax.jit(lambda embedding, before: embedding[before].T)
    head = of_head(embedding, jax.device_put(before))
    return params | {"head": {"kernel": head}}


def prompts_of(load: Load, length: int, vocabulary: int) -> list[list[int]]:
    """The prompts of a load, prose first. Every request has its own loop, or its own stretch of the
    ring of prose."""
    random, prose = np.random.default_rng(0), LOOP * LOOPS
    apart = (vocabulary - prose) // (2 * max(load.prose, 1))
    elsewhere = lambda count: random.integers(prose + vocabulary // 2, vocabulary, count).tolist()
    prompts = []
    for request in range(load.prose):
        start = prose + request * apart
        to_come = start + 1 + random.permutation(int(length / 2 / MISLEADING))[: length // 2 - 1]
        pairs = [token for one in to_come.tolist() for token in (one, *elsewhere(1))]
        prompts.append([*elsewhere(length - 1 - len(pairs)), *pairs, start])
    for request in range(load.repetitive):
        loop = range(request * LOOP, (request + 1) * LOOP)
        prompts.append([*elsewhere(length - LOOP), *loop])
    return prompts


def in_turn(
    engine: Engine, load: Load, turn: int, options: argparse.Namespace
) -> dict[str, Window]:
    """Runs both methods, in an order that alternates between turns."""
    methods = ("plain", "ngram") if turn % 2 else ("ngram", "plain")
    return {method: window(engine, load, method == "ngram", options) for method in methods}


def window(engine: Engine, load: Load, speculate: bool, options: argparse.Namespace) -> Window:
    vocab_size = engine.models.target.vocab_size
    prompts = prompts_of(load, options.prompt, vocab_size)
    params = SamplingParams(most_tokens(options), ignore_eos=True, speculate=speculate)
    ids = [engine.submit(prompt, params) for prompt in prompts]
    tokens: dict[int, list[int]] = defaultdict(list)
    for event in step_until_all_decode(engine, ids):
        tokens[event.index] += event.token_ids
    before = [len(tokens[id]) for id in ids]
    wide = WideSteps()
    with engine.observe(wide):
        begin = time.perf_counter()
        events = [event for _ in range(load.steps(options)) for event in engine.step(ids)]
        seconds = time.perf_counter() - begin
    engine.abort(ids)
    for event in events:
        tokens[event.index] += event.token_ids
    for id, prompt in zip(ids, prompts):
        check(prompt, tokens[id], successors(vocab_size))
    given = [len(tokens[id]) - count for id, count in zip(ids, before)]
    by_kind = {"prose": given[: load.prose], "repetitive": given[load.prose :]}
    sums = {kind: sum(counts) for kind, counts in by_kind.items() if counts}
    return Window(seconds, sums, wide.count)


def check(prompt: list[int], tokens: list[int], after: np.ndarray) -> None:
    for before, token in zip((prompt[-1], *tokens), tokens):
        assert token == after[before], f"after {before} came {token}, not {after[before]}"


def row_of(
    load: Load, turns: list[dict[str, Window]], options: argparse.Namespace
) -> dict[str, Any]:
    """Medians over the turns. A ratio compares a window with the plain window of the same turn."""
    kinds = list(turns[0]["plain"].tokens)

    def rate(window: Window, kind: str) -> float:
        return window.tokens[kind] / window.seconds / max(getattr(load, kind), 1)

    def median(of: Callable[[dict[str, Window]], float]) -> float:
        return statistics.median(map(of, turns))

    def tokens_per_s(method: str, kind: str) -> float:
        return median(lambda turn: rate(turn[method], kind))

    def ratio(kind: str, turn: dict[str, Window]) -> float:
        return rate(turn["ngram"], kind) / rate(turn["plain"], kind)

    wide = sum(turn["ngram"].wide_steps for turn in turns)
    steps = load.steps(options)
    return {
        "load": str(load),
        "plain_step_ms": median(lambda turn: 1e3 * turn["plain"].seconds / steps),
        "ngram_step_ms": median(lambda turn: 1e3 * turn["ngram"].seconds / steps),
        "wide_steps": wide / (len(turns) * steps),
        "tokens_per_s_each": {
            method: {kind: tokens_per_s(method, kind) for kind in kinds}
            for method in ("plain", "ngram")
        },
        "ratio": {kind: median(partial(ratio, kind)) for kind in kinds},
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'load':<24}{'plain ms':>9}{'ngram ms':>9}{'wide':>6}   tokens/s over plain"]
    for row in rows:
        ratios = ", ".join(f"{kind} {ratio:.3f}" for kind, ratio in row["ratio"].items())
        lines.append(
            f"{row['load']:<24}{row['plain_step_ms']:>9.3f}{row['ngram_step_ms']:>9.3f}"
            f"{100 * row['wide_steps']:>5.0f}%   {ratios}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(cli.run(main))
