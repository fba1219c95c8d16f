"""Shows that with `exact` every method gives the same bits, whatever else is in the batch.

    python scripts/check_exact.py --model qwen3-0.6b --json exact.json

Weights are random and in bf16, with a head of their own, because a random model with a tied head
only repeats itself. Drafts come from four sources: none, DFlash with random weights (never right),
prompt lookup, and a replay of the plain run with a fifth of the drafts spoiled (right for a while,
then wrong, at every position of the block). All tokens and the top 20 log probabilities of every
token are compared with `==`.

Without `exact`, the criterion is regret: if a stream is read in one go, none of its tokens may be
more than 0.20 nat less likely than the likeliest one at its position. Every position is checked,
and streams must have equal lengths.

The report has margins beside the verdicts: by how much the plain run's tokens are likelier than the
second likeliest ones (if that is little, other sums would give another token), the largest
difference of a log probability from the plain run's, and the largest regret beside the allowed one.

Every stage prints its seconds to stderr, and the report is written after each case, so that a time
limit costs only the last cases.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from measuring import about, write_json
from regret import Regret

from jaxspec import cli
from jaxspec.engine.engine import Engine
from jaxspec.engine.requests.output import RequestOutput
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.engine.setup.opened import Opened
from jaxspec.engine.setup.warmup import compile_side_by_side
from jaxspec.engine.step.compiled import Program
from jaxspec.measure.compile_clock import CompileClock
from jaxspec.measure.engines import random_models
from jaxspec.models.presets import dflash_for, published
from jaxspec.models.shapes import NAMES
from jaxspec.proposers.methods import METHODS, Method

MOST_REGRET = 0.20
SPOILED = 0.2
CHUNK, CONTEXT = 128, 512
COMPANY = "in company"
ALONE = "alone"


class Case(NamedTuple):
    part: str
    """exact, or buckets, which is an engine without `exact`, with a program per batch size."""
    method: str
    company: str

    def __str__(self) -> str:
        return f"{self.method}, {self.company}"


REFERENCE = Case("exact", "none", ALONE)
CASES = (
    Case("exact", "none", COMPANY),
    Case("exact", "dflash", COMPANY),
    Case("exact", "ngram", COMPANY),
    Case("exact", "replay", COMPANY),
    Case("exact", "replay", ALONE),
    Case("buckets", "none", COMPANY),
    Case("buckets", "replay", COMPANY),
    Case("buckets", "ngram", COMPANY),
    Case("buckets", "dflash", ALONE),
    Case("exact", "dflash", ALONE),
    Case("exact", "ngram", ALONE),
)
"""The cases, the slowest last, so that a time limit costs these first."""
Prompts = Sequence[Sequence[int]]


class Replay:
    """A host proposer whose drafts are the next tokens of a recorded run, some of them spoiled."""

    def __init__(self, recorded: list[tuple[int, ...]]):
        self.recorded, self.random = recorded, random.Random(1)
        self.tokens: dict[int, tuple[int, ...]] = {}

    def commit(
        self, request: int, tokens: Sequence[int], num_drafts: int = 0, accepted: int = 0
    ) -> None:
        self.tokens[request] = (*self.tokens.get(request, ()), *tokens)

    def propose(self, request: int, room: int) -> list[int]:
        begun = self.tokens[request]
        whole = next((one for one in self.recorded if one[: len(begun)] == begun), ())
        right = whole[len(begun) :][:room]
        return [1 if self.random.random() < SPOILED else token for token in right]

    def release(self, request: int) -> None:
        self.tokens.pop(request, None)


def main() -> None:
    options = parse()
    report = Report(options)
    pair = report.stage("weights", lambda: build(options))
    prompts = random_prompts(options, pair.models.target.vocab_size)
    recorded: list[tuple[int, ...]] = []
    METHODS["replay"] = Method(host=lambda _: Replay(recorded))
    asked = lambda case: case.part in options.parts and case.method in options.methods
    cases = list(filter(asked, CASES))
    bench = Bench(options, pair)
    report.stage("programs", lambda: bench.compile(cases))
    plain = report.stage(f"exact: {REFERENCE}", lambda: bench.run(REFERENCE, prompts))
    recorded += [(*output.prompt_token_ids, *output.token_ids) for output in plain]
    report.contents["distinct_tokens"] = len({t for o in plain for t in o.token_ids})
    report.contents["leads_nat"] = leads(plain)
    regret = Regret(pair.models.target, pair.params["target"], CONTEXT)
    judges = {"exact": compare, "buckets": partial(judge_regret, regret)}
    for case in cases:
        judge = judges[case.part]
        report.judge(case, lambda case=case, judge=judge: judge(plain, bench.run(case, prompts)))
    bench.wait()
    report.contents["exact_ms_per_step"] = bench.milliseconds["exact"]
    report.contents["bucket_ms_per_step"] = bench.milliseconds["buckets"]
    report.close()


class Report:
    """The results so far, on stderr and in a file."""

    def __init__(self, options: argparse.Namespace):
        self.path, self.clock, self.begin = options.json, CompileClock(), time.perf_counter()
        self.failed: list[str] = []
        self.contents: dict[str, Any] = {
            **about(),
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

    def judge(self, case: Case, judge: Callable[[], dict[str, Any]]) -> None:
        result = self.stage(f"{case.part}: {case}", judge)
        self.contents[case.part][str(case)] = result
        self.failed += [] if result["passed"] else [f"{case.part}: {case}"]
        print(f"          {result}", file=sys.stderr, flush=True)
        write_json(self.path, self.contents)

    def close(self) -> None:
        write_json(self.path, self.contents)
        print(json.dumps(self.contents, indent=1))
        sys.exit(f"differ: {self.failed}" if self.failed else None)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="qwen3-0.6b", choices=NAMES)
    parser.add_argument("--prompts", type=positive, default=10)
    parser.add_argument("--slots", type=positive, default=8)
    parser.add_argument("--tokens", type=positive, default=204)
    parser.add_argument("--longest-prompt", type=int, default=CHUNK)
    parts, methods = ["exact", "buckets"], ["none", "dflash", "ngram", "replay"]
    parser.add_argument("--parts", nargs="+", default=parts, choices=parts)
    parser.add_argument("--methods", nargs="+", default=methods, choices=methods)
    parser.add_argument("--json", help="file for the report")
    return parser.parse_args()


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


def random_prompts(options: argparse.Namespace, vocab_size: int) -> Prompts:
    random = np.random.default_rng(0)
    lengths = random.integers(5, options.longest_prompt, options.prompts)
    return [random.integers(0, vocab_size, length).tolist() for length in lengths]


def build(options: argparse.Namespace) -> Opened:
    config = replace(published(options.model), tie_word_embeddings=False)
    if options.model == "tiny":
        config = replace(config, vocab_size=500)
    draft = replace(dflash_for(config), mask_token_id=config.vocab_size - 1)
    return random_models(config, draft, jnp.bfloat16)


class Bench:
    """Engines over the same parameters, and their outputs for the prompts."""

    def __init__(self, options: argparse.Namespace, pair: Opened):
        self.slots, self.tokens = options.slots, options.tokens
        self.pair = pair
        self.engines: dict[tuple[str, str, int], Engine] = {}
        self.milliseconds: dict[str, dict[str, float]] = {"exact": {}, "buckets": {}}

    def engine(self, case: Case) -> Engine:
        """The engine of a case. Without `exact` it has one batch size only, because compiling takes
        longer than decoding."""
        exact = case.part == "exact"
        slots = 1 if case.company == ALONE and not exact else self.slots
        key = case.part, case.method, slots
        if key not in self.engines:
            self.engines[key] = Engine.from_models(
                self.pair.models,
                self.pair.params,
                method=case.method,
                max_batch=slots,
                max_model_len=CONTEXT,
                num_pages=slots * (CONTEXT // 64 + 1),
                prefill_chunk=CHUNK,
                exact=exact,
                batch_sizes=(slots,),
                prefill_shapes=None if exact else ((min(4, slots), CHUNK),),
                driver="overlapped",
                prefix_caching=False,
                compile_ahead=False,
                num_drafts=self.pair.models.proposers[0].num_drafts,
                ngram_threshold=0.0,
            )
        return self.engines[key]

    def compile(self, cases: Sequence[Case]) -> int:
        """Compiles every program of these cases once, and returns their number."""
        programs: dict[str, Program] = {}
        for case in (REFERENCE, *cases):
            engine = self.engine(case)
            for program in engine.programs(draws=False, only_needed=True):
                programs.setdefault(_identity(engine, program), program)
        return compile_side_by_side(programs.values())

    def run(self, case: Case, prompts: Prompts) -> list[RequestOutput]:
        """The output of every prompt. Steps are timed if their number is known."""
        engine = self.engine(case)
        params = SamplingParams(
            self.tokens, ignore_eos=True, logprobs=20 if case.part == "exact" else None
        )
        if case.company == COMPANY:
            return among_others(engine, prompts, params)
        engine.generate(prompts[0], replace(params, max_tokens=2))
        begin = time.perf_counter()
        outputs = [engine.generate(prompt, params) for prompt in prompts]
        seconds = time.perf_counter() - begin
        if steps := num_steps(case, outputs):
            self.milliseconds[case.part][str(case)] = round(seconds / steps * 1e3, 3)
        return outputs

    def wait(self) -> None:
        """Waits until the devices have run everything."""
        for engine in self.engines.values():
            with engine.borrow_device():
                engine.wait()


def _identity(engine: Engine, program: Program) -> str:
    """A key that is equal for programs that have to be compiled only once."""
    shapes = jax.tree.map(lambda leaf: leaf.shape, program.inputs)
    plan = engine.plan
    of_engine = plan.num_slots, plan.exact or plan.method == "ngram"
    return f"{of_engine} {program.name} {shapes} {program.static}"


def num_steps(case: Case, outputs: Sequence[RequestOutput]) -> int | None:
    """How many steps the requests took if they ran one after the other; None if some of the steps
    did not draft."""
    if case.method == "none":
        return sum(len(output.token_ids) for output in outputs)
    if case.method in ("dflash", "replay"):
        return sum(output.stats.num_spec_steps for output in outputs)
    return None


def among_others(engine: Engine, prompts: Prompts, params: SamplingParams) -> list[RequestOutput]:
    """The prompts' outputs while short requests keep coming and going."""
    requests: list[tuple[Sequence[int], SamplingParams]] = []
    ours = []
    for i, prompt in enumerate([*prompts] * 3):
        requests.append((prompt[: 3 + i], replace(params, max_tokens=5 + 7 * (i % 9))))
        if i < len(prompts):
            ours.append(len(requests))
            requests.append((prompt, params))
    outputs = engine.generate([r[0] for r in requests], [r[1] for r in requests])
    return [outputs[index] for index in ours]


def leads(outputs: Sequence[RequestOutput]) -> dict[str, float]:
    """By how much the likeliest token is likelier than the second likeliest, in log probability."""
    ranked = [sorted(one.values()) for output in outputs for one in output.logprobs or ()]
    of_tokens = sorted(values[-1] - values[-2] for values in ranked)
    return {
        "least": of_tokens[0],
        "median": statistics.median(of_tokens),
        "share_below_0.05": sum(lead < 0.05 for lead in of_tokens) / len(of_tokens),
    }


def largest_difference(expected: RequestOutput, found: RequestOutput) -> float:
    """The largest difference between two log probabilities of the same token, over the positions
    before which all tokens agree."""
    largest = 0.0
    streams = zip(expected.token_ids, found.token_ids)
    for ours, theirs, (token, other) in zip(expected.logprobs or (), found.logprobs or (), streams):
        shared = ours.keys() & theirs.keys()
        largest = max([largest, *(abs(ours[one] - theirs[one]) for one in shared)])
        if token != other:
            break
    return largest


def compare(expected: Sequence[RequestOutput], found: Sequence[RequestOutput]) -> dict[str, Any]:
    """Equality of tokens and of log probabilities, bit for bit."""
    tokens = [e.token_ids == f.token_ids for e, f in zip(expected, found, strict=True)]
    logprobs = [e.logprobs == f.logprobs for e, f in zip(expected, found, strict=True)]
    lengths = [f.stats.mean_acceptance_length for f in found]
    return {
        "passed": all(tokens) and all(logprobs),
        "tokens_compared": sum(len(e.token_ids) for e in expected),
        "prompts_with_equal_tokens": f"{sum(tokens)}/{len(tokens)}",
        "prompts_with_equal_logprobs": f"{sum(logprobs)}/{len(logprobs)}",
        "largest_logprob_difference": max(map(largest_difference, expected, found)),
        "drafts_verified": sum(f.stats.num_draft_tokens for f in found),
        "mean_acceptance_length": round(float(np.mean(lengths)), 2),
    }


def judge_regret(
    regret: Regret, plain: Sequence[RequestOutput], found: Sequence[RequestOutput]
) -> dict[str, Any]:
    worst = max(map(regret.worst, found))
    lengths = all(len(f.token_ids) == len(p.token_ids) for f, p in zip(found, plain))
    same = sum(f.token_ids == p.token_ids for f, p in zip(found, plain, strict=True))
    return {
        "passed": worst <= MOST_REGRET and lengths,
        "worst_regret_nat": round(worst, 4),
        "allowed_regret_nat": MOST_REGRET,
        "streams_equal_to_exact_plain": f"{same}/{len(found)}",
        "drafts_verified": sum(f.stats.num_draft_tokens for f in found),
    }


if __name__ == "__main__":
    sys.exit(cli.run(main))
