"""Shows that with `exact` every method gives the same bits, whoever else is in the batch.

    python scripts/check_exact.py --model qwen3-0.6b --json exact.json

bf16, random weights with a head of their own (a tied random model only repeats itself). Drafts
come from four sources: none, DFlash with random weights (never right), prompt lookup, and a replay
of the plain run with a fifth of the drafts spoiled (right for a while, then wrong, at every place
of the block). Compared with `==`: all tokens, and the top 20 log probabilities of every token.

Without `exact`, the gate is regret: no emitted token may be more than 0.20 nat less likely than
the likeliest one when the stream itself is read in one go; every position is checked, and streams
must be of equal length.

Every stage says on stderr what it took; the report is written after each, so that a time limit
costs the last stages only.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxspec.engine.plan.shapes import Shapes
from jaxspec.engine.schedule.drivers import DRIVERS
from measuring import write_json

from jaxspec import cli
from jaxspec.cache.block import block_after
from jaxspec.engine.engine import Engine
from jaxspec.engine.requests.output import RequestOutput
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.engine.schedule.loop import Loop
from jaxspec.engine.setup.warmup import compile_side_by_side, needed_programs
from jaxspec.engine.step.io import Models
from jaxspec.engine.step.upload import block_of, filled
from jaxspec.measure.compile_clock import CompileClock
from jaxspec.measure.environment import environment
from jaxspec.models.dflash import DFlash
from jaxspec.models.parameters import random_params
from jaxspec.models.presets import NAMES, dflash_for, qwen3
from jaxspec.models.qwen3 import Qwen3
from jaxspec.proposers.lookup import lookup_of
from jaxspec.proposers.ngram import NgramProposer

REGRET = 0.20
SPOILED = 0.2
CHUNK, CONTEXT = 128, 512
COMPANY = "in company"
ALONE = "alone"
CASES = (
    ("exact", ("none", COMPANY)),
    ("exact", ("dflash", COMPANY)),
    ("exact", ("ngram", COMPANY)),
    ("exact", ("replay", COMPANY)),
    ("exact", ("replay", ALONE)),
    ("buckets", ("none", COMPANY)),
    ("buckets", ("replay", COMPANY)),
    ("buckets", ("ngram", COMPANY)),
    ("buckets", ("dflash", ALONE)),
    ("exact", ("dflash", ALONE)),
    ("exact", ("ngram", ALONE)),
)
"""In the order in which a time limit should cut them: the slowest last."""
Prompts = Sequence[Sequence[int]]


def main() -> None:
    options = parse()
    report = Report(options)
    models, params = report.stage("weights", lambda: build(options))
    prompts = random_prompts(options, models.target.config.vocab_size)
    exact = Fleet(options, models, params, exact=True)
    loose = Fleet(options, models, params, exact=False)
    report.stage("programs", lambda: compile_needed(exact, loose))
    plain = report.stage("exact: none, alone", lambda: exact.run("none", ALONE, prompts))
    report.contents["distinct_tokens"] = len({t for o in plain for t in o.token_ids})
    regrets = Regrets(models, params)

    def judge(part: str, case: tuple[str, str]) -> dict[str, Any]:
        if part == "exact":
            return compare(plain, exact.run(*case, prompts, plain))
        return regrets(loose.run(*case, prompts, plain), plain)

    for part, case in CASES:
        report.judge(part, case, judge)
    for fleet in (exact, loose):
        fleet.engine.loop.land_all()
        jax.block_until_ready(fleet.engine.loop.device.state)
    report.contents["exact_ms_per_step"] = exact.milliseconds
    report.contents["bucket_ms_per_step"] = loose.milliseconds
    report.close()


class Report:
    """What was found so far, on stderr and in a file."""

    def __init__(self, options: argparse.Namespace):
        self.path, self.clock, self.begin = options.json, CompileClock(), time.perf_counter()
        self.failed: list[str] = []
        self.contents: dict[str, Any] = {
            "command": " ".join(["python", *sys.argv]),
            "environment": environment(),
            "model": options.model,
            "tokens_per_case": options.prompts * options.tokens,
            "exact": {},
            "buckets": {},
        }

    def stage(self, name: str, work: Callable[[], Any]) -> Any:
        begin, compiled = time.perf_counter(), self.clock.seconds
        result = work()
        now = time.perf_counter()
        print(
            f"{now - self.begin:6.1f} s  {name}: {now - begin:.1f} s, "
            f"{self.clock.seconds - compiled:.1f} of them compiling",
            file=sys.stderr,
            flush=True,
        )
        return result

    def judge(self, part: str, case: tuple[str, str], judge: Callable[..., dict]) -> None:
        name = ", ".join(case)
        found = self.stage(f"{part}: {name}", lambda: judge(part, case))
        self.contents[part][name] = found
        self.failed += [] if found["passed"] else [f"{part}: {name}"]
        print(f"          {found}", file=sys.stderr, flush=True)
        write_json(self.path, self.contents)

    def close(self) -> None:
        write_json(self.path, self.contents)
        print(json.dumps(self.contents, indent=1))
        sys.exit(f"differ: {self.failed}" if self.failed else None)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-0.6b", choices=(*NAMES, "tiny"))
    parser.add_argument("--prompts", type=positive, default=10)
    parser.add_argument("--slots", type=positive, default=8)
    parser.add_argument("--tokens", type=positive, default=204)
    parser.add_argument("--longest-prompt", type=int, default=CHUNK)
    parser.add_argument("--json", help="file for the report")
    return parser.parse_args()


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


def random_prompts(options: argparse.Namespace, vocabulary: int) -> Prompts:
    random = np.random.default_rng(0)
    lengths = random.integers(5, options.longest_prompt, options.prompts)
    return [random.integers(0, vocabulary, length).tolist() for length in lengths]


def build(options: argparse.Namespace) -> tuple[Models, dict[str, Any]]:
    config = replace(
        qwen3("qwen3-0.6b" if options.model == "tiny" else options.model),
        tie_word_embeddings=False,
    )
    if options.model == "tiny":
        decoder = replace(config.decoder, num_layers=5, hidden_size=64, intermediate_size=128)
        config = replace(config, decoder=decoder, vocab_size=500)
    draft = replace(dflash_for(config), mask_token_id=config.vocab_size - 1)
    models = Models(
        Qwen3(config, draft.target_layer_ids, jnp.bfloat16), DFlash(draft, jnp.bfloat16)
    )
    params = {
        "target": random_params(models.target, jax.random.key(0)),
        "drafter": random_params(models.drafter, jax.random.key(1)),
    }
    return models, jax.block_until_ready(params)


class Fleet:
    """One engine that takes on one method after the other; its programs stay."""

    def __init__(self, options: argparse.Namespace, models: Models, params: Any, exact: bool):
        logprobs = 20 if exact else None
        self.slots = options.slots
        self.params = SamplingParams(options.tokens, ignore_eos=True, logprobs=logprobs)
        self.engine = Engine.from_models(
            models,
            params,
            method="dflash",
            max_batch=options.slots,
            max_model_len=CONTEXT,
            num_pages=options.slots * (CONTEXT // 64 + 1),
            prefill_chunk=CHUNK,
            exact=exact,
            driver="overlapped",
            num_drafts=models.drafter.config.block_size - 1,
            ngram_threshold=0.0,
        )
        self.milliseconds: dict[str, float] = {}

    def run(
        self, method: str, company: str, prompts: Prompts, plain: Sequence[RequestOutput] = ()
    ) -> list[RequestOutput]:
        """Every prompt's output; steps are timed where their number is known."""
        self.take_on(method, company, plain)
        if company == COMPANY:
            return self.together(prompts)
        self.engine.generate(prompts[0], replace(self.params, max_tokens=2))
        begin = time.perf_counter()
        outputs = [self.engine.generate(prompt, self.params) for prompt in prompts]
        seconds = time.perf_counter() - begin
        drafting = sum(output.stats.num_spec_steps for output in outputs)
        steps = drafting if method in ("dflash", "replay") else None
        steps = len(prompts) * self.params.max_tokens if method == "none" else steps
        if steps:
            self.milliseconds[f"{method}, {company}"] = round(seconds / steps * 1e3, 3)
        return outputs

    def together(self, prompts: Prompts) -> list[RequestOutput]:
        """Among neighbours that come and go: short requests keep passing through."""
        passing = [(prompt[: 3 + i], 5 + 7 * (i % 9)) for i, prompt in enumerate([*prompts] * 3)]
        asked = []
        for i, neighbour in enumerate(passing):
            asked.append((neighbour[0], replace(self.params, max_tokens=neighbour[1])))
            if i < len(prompts):
                asked.append((prompts[i], self.params))
        outputs = self.engine.generate(*map(list, zip(*asked)))
        return outputs[1 : 2 * len(prompts) : 2]

    def take_on(self, method: str, company: str, plain: Sequence[RequestOutput]) -> None:
        loop = self.engine.loop
        width = loop.plan.block_size if loop.plan.exact or method != "none" else 1
        shapes = loop.plan.shapes
        if not loop.plan.exact:  # few buckets: compiling takes longer than decoding
            slots = 1 if company == ALONE else self.slots
            shapes = Shapes((slots,), ((min(4, self.slots), CHUNK),))
        options, ngram = self.engine.options, method == "ngram"
        loop.plan = replace(
            loop.plan,
            method="none" if method == "replay" else method,
            width=width,
            shapes=shapes,
            lookup=lookup_of(options, width - 1) if ngram and options.exact else None,
        )
        loop.proposer = NgramProposer(options) if ngram else None
        loop.driver = DRIVERS["overlapped"]
        if method == "replay":
            known = {output.prompt_token_ids: output.token_ids for output in plain}
            loop.driver = replay(known, np.random.default_rng(1))


def compile_needed(exact: Fleet, loose: Fleet) -> int:
    """Every program of every case, once."""
    fleets = {"exact": exact, "buckets": loose}
    found = {}
    for part, (method, company) in CASES:
        fleet = fleets[part]
        fleet.take_on(method, company, ())
        device = fleet.engine.loop.device
        for step, inputs, static in needed_programs(device, fleet.engine.loop.plan, draws=False):
            lower = partial(device.lower, step, *inputs, **static)
            shapes = jax.tree.map(lambda leaf: leaf.shape, inputs)
            found.setdefault(f"{part} {step} {shapes} {static}", lower)
    return compile_side_by_side(lower() for lower in found.values())


def replay(known: dict[tuple[int, ...], tuple[int, ...]], random: np.random.Generator):
    """A driver whose drafts are the known continuation, some of them spoiled."""

    def drafts_for(prompt: tuple[int, ...], after: int, count: int) -> list[int]:
        right = known.get(prompt, ())[after : after + count]
        return [1 if random.random() < SPOILED else token for token in right]

    def drive(loop: Loop) -> None:
        loop.admit()
        loop.read_prompts()
        loop.land_all()
        if not (requests := loop.decoding()):
            return
        slots, count = loop.slots(requests), loop.plan.width - 1
        spans = [drafts_for(r.prompt, len(r.token_ids), count) for r in requests]
        drafts, num_drafts = block_of(spans, slots.size, count), filled((slots.size,), count)
        block = slots, drafts, num_drafts, None
        verified = loop.device.run("verify_step", *block, draws=loop.plan.exact)
        loop.fly(requests, loop.device.run("accept_step", slots, drafts, verified))
        loop.land_all()

    return drive


def compare(expected: list[RequestOutput], found: list[RequestOutput]) -> dict[str, Any]:
    """Equality of tokens and of log probabilities, bit for bit."""
    tokens = [e.token_ids == f.token_ids for e, f in zip(expected, found, strict=True)]
    logprobs = [e.logprobs == f.logprobs for e, f in zip(expected, found, strict=True)]
    lengths = [f.stats.mean_acceptance_length for f in found]
    return {
        "passed": all(tokens) and all(logprobs),
        "tokens_compared": sum(len(e.token_ids) for e in expected),
        "prompts_with_equal_tokens": f"{sum(tokens)}/{len(tokens)}",
        "prompts_with_equal_logprobs": f"{sum(logprobs)}/{len(logprobs)}",
        "drafts_verified": sum(f.stats.num_draft_tokens for f in found),
        "mean_acceptance_length": round(float(np.mean(lengths)), 2),
    }


class Regrets:
    """The worst token of every stream, judged by reading the stream in one go."""

    def __init__(self, models: Models, params: Any):
        self.params = params
        self.score = jax.jit(lambda params, tokens: scores(models, params, tokens))

    def __call__(self, found: list[RequestOutput], plain: list[RequestOutput]) -> dict[str, Any]:
        worst = max(map(self.worst, found))
        lengths = all(len(f.token_ids) == len(p.token_ids) for f, p in zip(found, plain))
        same = sum(f.token_ids == p.token_ids for f, p in zip(found, plain, strict=True))
        return {
            "passed": worst <= REGRET and lengths,
            "worst_regret_nat": round(worst, 4),
            "streams_equal_to_exact_plain": f"{same}/{len(found)}",
            "drafts_verified": sum(f.stats.num_draft_tokens for f in found),
        }

    def worst(self, output: RequestOutput) -> float:
        assert output.error is None, output.error
        tokens = [*output.prompt_token_ids, *output.token_ids]
        padded = np.zeros(CONTEXT, np.int32)
        padded[: len(tokens)] = tokens
        regret = np.asarray(self.score(self.params, padded))
        return float(regret[len(output.prompt_token_ids) - 1 : len(tokens) - 1].max())


def scores(models: Models, params: Any, tokens: jax.Array) -> jax.Array:
    """Regret of every next token: log probability of the likeliest less its own."""
    length = tokens.size
    cache = models.target.new_cache(1, 1 + length // 64, 64)
    table = jnp.arange(1, 1 + length // 64, dtype=jnp.int32)[None]
    zero = jnp.zeros(1, jnp.int32)
    block = block_after(zero, zero, zero + length, table, length, 64)
    variables = {"params": params["target"]}
    hidden, _, _ = models.target.apply(variables, tokens[None], block, cache)
    logits = models.target.apply(variables, hidden, method="logits")[0].astype(jnp.float32)
    logprobs = jax.nn.log_softmax(logits[:-1])
    own = jnp.take_along_axis(logprobs, tokens[1:, None], axis=-1)[:, 0]
    return logprobs.max(axis=-1) - own


if __name__ == "__main__":
    sys.exit(cli.run(main))
