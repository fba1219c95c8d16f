"""Shows that with `exact` every method gives the same bits, whoever else is in the batch.

    python scripts/check_exact.py --model qwen3-0.6b --json exact.json

bf16, random weights with a head of their own (a tied random model only repeats itself). Drafts
come from three sources: none, DFlash with random weights (never right), and a replay of the plain
run with a fifth of the drafts spoiled (right for a while, then wrong, at every place of the
block). Compared with `==`: all tokens, and the top 20 log probabilities of every token.

Without `exact`, the gate is regret: no emitted token may be more than 0.20 nat less likely than
the likeliest one when the stream itself is read in one go; every position is checked, and streams
must be of equal length.
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from measuring import write_json

from jaxspec.cache.block import block_after
from jaxspec.engine.drivers import DRIVERS
from jaxspec.engine.engine import Engine
from jaxspec.engine.loop import Loop
from jaxspec.engine.output import RequestOutput
from jaxspec.engine.params import SamplingParams
from jaxspec.engine.steps import Models
from jaxspec.measure.environment import environment
from jaxspec.models.dflash import DFlash
from jaxspec.models.parameters import pool_for, random_params
from jaxspec.models.presets import NAMES, dflash_for, qwen3
from jaxspec.models.qwen3 import Qwen3

REGRET = 0.20


def main() -> None:
    options = parse()
    models, params = build(options)
    random = np.random.default_rng(0)
    vocabulary = models.target.config.vocab_size
    prompts = [
        random.integers(0, vocabulary, length).tolist()
        for length in random.integers(5, options.longest_prompt, options.prompts)
    ]
    report: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "environment": environment(),
        "model": options.model,
        "tokens_per_method": options.prompts * options.tokens,
    }
    exact = Fleet(options, models, params, exact=True)
    plain = exact.alone("none", prompts)
    report["distinct_tokens"] = len({t for o in plain for t in o.token_ids})
    report["exact"] = {
        f"{method}, {company}": compare(plain, run(method, prompts, plain))
        for method in ("none", "dflash", "replay")
        for company, run in (("alone", exact.alone), ("in company", exact.together))
    }
    report["exact_ms_per_step"] = exact.milliseconds
    write_json(options.json, report)  # what a time limit leaves is still written
    print(json.dumps(report["exact"]), file=sys.stderr, flush=True)
    loose = Fleet(options, models, params, exact=False)
    report["buckets"] = {
        f"{method}, {company}": regrets(models, params, run(method, prompts, plain), plain)
        for method, company, run in (
            ("none", "in company", loose.together),
            ("dflash", "alone", loose.alone),
            ("replay", "in company", loose.together),
        )
    }
    report["bucket_ms_per_step"] = loose.milliseconds
    write_json(options.json, report)
    for name in ("exact", "exact_ms_per_step", "buckets", "bucket_ms_per_step"):
        print(name)
        for case, result in report[name].items():
            print(f"  {case:<22}{result}")
    failed = [c for c, r in report["exact"].items() if not r["equal"]]
    failed += [c for c, r in report["buckets"].items() if not r["passed"]]
    sys.exit(f"differ: {failed}" if failed else None)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-0.6b", choices=(*NAMES, "tiny"))
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=220)
    parser.add_argument("--longest-prompt", type=int, default=200)
    parser.add_argument("--json", help="file for the report")
    return parser.parse_args()


def build(options: argparse.Namespace) -> tuple[Models, dict[str, Any]]:
    config = replace(qwen3("qwen3-0.6b"), tie_word_embeddings=False)
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
    return models, params


class Fleet:
    """One engine per method, all over the same parameters."""

    def __init__(self, options: argparse.Namespace, models: Models, params: Any, exact: bool):
        self.params = SamplingParams(
            max_tokens=options.tokens, ignore_eos=True, logprobs=20 if exact else None
        )
        self.engine = Engine.from_models(
            models,
            params,
            method="dflash",
            max_batch=8,
            max_model_len=512,
            num_pages=8 * 9,
            prefill_chunk=128,
            exact=exact,
            driver="overlapped",
        )
        self.milliseconds: dict[str, float] = {}

    def alone(
        self, method: str, prompts: list[list[int]], plain: list[RequestOutput] = ()
    ) -> list[RequestOutput]:
        self.switch(method, prompts, plain)
        outputs = []
        for prompt in prompts:
            begin = time.perf_counter()
            outputs.append(self.engine.generate(prompt, self.params))
            print(method, len(outputs), file=sys.stderr, flush=True)
            seconds = time.perf_counter() - begin
        steps = max(len(outputs[-1].stats.acceptance_lengths), 1)
        steps = steps if method != "none" else self.params.max_tokens
        self.milliseconds[f"{method}, alone"] = round(seconds / steps * 1e3, 3)
        return outputs

    def together(
        self, method: str, prompts: list[list[int]], plain: list[RequestOutput] = ()
    ) -> list[RequestOutput]:
        """Among neighbours that come and go: short requests keep passing through."""
        self.switch(method, prompts, plain)
        passing = [prompt[: 3 + i] for i, prompt in enumerate(prompts * 3)]
        budgets = [5 + 7 * (i % 9) for i in range(len(passing))]
        mixed = [p for pair in zip(passing, prompts * 3) for p in pair][: 2 * len(prompts)]
        rest = passing[len(prompts) :]
        asked = [self.params] * len(mixed) + [None] * len(rest)
        for i in range(len(mixed)):
            if i % 2 == 0:
                asked[i] = replace(self.params, max_tokens=budgets[i])
        for i in range(len(rest)):
            asked[len(mixed) + i] = replace(self.params, max_tokens=budgets[i])
        return self.engine.generate(mixed + rest, asked)[1 : 2 * len(prompts) : 2]

    def switch(self, method: str, prompts: list[list[int]], plain: list[RequestOutput]) -> None:
        """The same engine drafts differently; its programs stay."""
        loop = self.engine.loop
        exact = loop.plan.exact
        name = "none" if method == "replay" else method
        width = loop.plan.block_size if exact or method != "none" else 1
        loop.plan = replace(loop.plan, method=name, width=width)
        loop.driver = DRIVERS["overlapped"]
        if method == "replay":
            known = {tuple(p): o.token_ids for p, o in zip(prompts, plain)}
            loop.driver = replay(known, np.random.default_rng(1))


def replay(known: dict[tuple[int, ...], tuple[int, ...]], random: np.random.Generator):
    """A driver whose drafts are the known continuation, a fifth of them spoiled."""

    def drive(loop: Loop) -> None:
        loop.admit()
        loop.read_prompts()
        loop.land_all()
        if not (requests := loop.decoding()):
            return
        slots = loop.slots(requests)
        drafts = np.zeros((slots.size, loop.plan.width - 1), np.int32)
        for row, request in enumerate(requests):
            after = len(request.token_ids)
            right = known.get(request.prompt, ())[after : after + drafts.shape[1]]
            drafts[row, : len(right)] = right
        spoiled = random.random(drafts.shape) < 0.2
        drafts = jnp.asarray(np.where(spoiled, 1, drafts))
        num_drafts = jnp.asarray(np.full(slots.size, drafts.shape[1], np.int32))
        verified = loop.device.run("verify_step", slots, drafts, num_drafts, draws=loop.plan.exact)
        loop.fly(requests, loop.device.run("accept_step", slots, drafts, verified))
        loop.land_all()

    return drive


def compare(expected: list[RequestOutput], found: list[RequestOutput]) -> dict[str, Any]:
    """Equality of tokens and of log probabilities, bit for bit."""
    tokens = [e.token_ids == f.token_ids for e, f in zip(expected, found, strict=True)]
    logprobs = [e.logprobs == f.logprobs for e, f in zip(expected, found, strict=True)]
    lengths = [f.stats.mean_acceptance_length for f in found]
    return {
        "equal": all(tokens) and all(logprobs),
        "tokens_compared": sum(len(e.token_ids) for e in expected),
        "prompts_with_equal_tokens": f"{sum(tokens)}/{len(tokens)}",
        "prompts_with_equal_logprobs": f"{sum(logprobs)}/{len(logprobs)}",
        "mean_acceptance_length": round(float(np.mean(lengths)), 2),
    }


def regrets(
    models: Models, params: Any, found: list[RequestOutput], plain: list[RequestOutput]
) -> dict[str, Any]:
    """The worst token of every stream, judged by reading the stream in one go."""
    score = jax.jit(lambda tokens: scores(models, params, tokens))
    length = 512
    worst, same = 0.0, 0
    for output, reference in zip(found, plain, strict=True):
        tokens = [*output.prompt_token_ids, *output.token_ids]
        padded = np.zeros(length, np.int32)
        padded[: len(tokens)] = tokens
        first = len(output.prompt_token_ids) - 1
        regret = np.asarray(score(padded))[first : len(tokens) - 1]
        worst = max(worst, float(regret.max()))
        same += output.token_ids == reference.token_ids
    lengths = all(len(f.token_ids) == len(p.token_ids) for f, p in zip(found, plain))
    return {
        "passed": worst <= REGRET and lengths,
        "worst_regret_nat": round(worst, 4),
        "streams_equal_to_exact_plain": f"{same}/{len(found)}",
    }


def scores(models: Models, params: Any, tokens: jax.Array) -> jax.Array:
    """Regret of every next token: log probability of the likeliest less its own."""
    length = tokens.size
    decoder = models.target.config.decoder
    pool = pool_for(decoder, 1 + length // 64, 64, models.target.dtype)
    table = jnp.arange(1, 1 + length // 64, dtype=jnp.int32)[None]
    zero = jnp.zeros(1, jnp.int32)
    block = block_after(zero, zero + length, table, length, 64)
    variables = {"params": params["target"]}
    hidden, _, _ = models.target.apply(variables, tokens[None], block, pool)
    logits = models.target.apply(variables, hidden, method="logits")[0].astype(jnp.float32)
    logprobs = jax.nn.log_softmax(logits[:-1])
    own = jnp.take_along_axis(logprobs, tokens[1:, None], axis=-1)[:, 0]
    return logprobs.max(axis=-1) - own


if __name__ == "__main__":
    main()
