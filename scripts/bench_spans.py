"""Adaptive widths against every fixed width and plain decoding, on a load that changes.

    python scripts/bench_spans.py --model qwen3-4b --json spans.json

Acceptance is synthetic, with a mean length that changes from phase to phase, as does the number of
requests. Every policy runs all phases through the engine's overlapped loop, while requests come and
go. The ages of requests are spread evenly in every phase, whatever the policy, so that no policy
reads longer contexts than another.

All steps in which every request decodes are counted, even if a policy has not noticed yet that the
phase changed. In a phase like 32x6.4+3.0, half of the requests have the first mean length and half
the second. A step counts the tokens that it gives on average at the rates from which acceptance is
drawn, so that chance decides nothing: with fixed widths those of its width, and with adaptive ones
those of the number of drafts that it verified for each request. Fixed widths have nothing to notice
and get fewer steps per phase. Every program has run before a policy is timed.

With `--anchors docs/results/peers-h100.json`, every phase also has the tokens per second of other
systems: from the times of their steps with whole blocks for every request, if such a step gives as
many tokens on average as ours. Their steps were timed by themselves, not in this run.
"""

import argparse
import gc
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul
from typing import Any

import jax.numpy as jnp
import numpy as np
from measuring import about, tell, write_json

from jaxspec import cli
from jaxspec.acceptance.synthetic import MixedAcceptance, from_length
from jaxspec.engine.adapt.acceptance_rates import expected_tokens
from jaxspec.engine.adapt.loop_costs import Costs
from jaxspec.engine.engine import Engine
from jaxspec.engine.plan.adapting import NARROWER_WIDTHS
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.engine.setup.opened import Opened
from jaxspec.engine.setup.step_costs import measure_costs
from jaxspec.engine.setup.warmup import compile_side_by_side
from jaxspec.engine.step.observer import Step, StepObserver
from jaxspec.engine.step.steps import decode_step
from jaxspec.measure.compile_clock import CompileClock
from jaxspec.measure.engines import random_pair
from jaxspec.measure.peers import read_peers
from jaxspec.models.shapes import NAMES

LONGEST, FIRST_CHUNK, LATER_CHUNK = 1024, 512, 16
"""Tokens of a request, and the widths of the chunks in which prompts are read. The wide chunk is
for requests that are in the middle of their replies when the phase begins, the narrow one for
requests that take the place of ended ones."""
SETTLING = 1
"""How many steps that only decode are not timed, after a step that did more or belongs to another
phase, because earlier launches are part of their time."""
BAR = 0.97
"""The least speed of adaptive widths, as a share of the speed of the best fixed width."""


@dataclass(frozen=True)
class Phase:
    requests: int
    lengths: tuple[float, float]
    """Mean acceptance lengths that whole blocks of the two kinds of requests would have."""

    def __str__(self) -> str:
        first, second = self.lengths
        return f"{self.requests} x {first:g}" + ("" if first == second else f"+{second:g}")

    def acceptance(self, block_size: int) -> MixedAcceptance:
        return MixedAcceptance(tuple(from_length(one, block_size - 1) for one in self.lengths))

    def shares(self, block_size: int) -> tuple[tuple[float, ...], ...]:
        """The same as an option of an engine."""
        kinds = self.acceptance(block_size).kinds
        return tuple((*accumulate(kind.conditional_rates, mul),) for kind in kinds)

    def tokens(self, width: int, block_size: int) -> float:
        """Tokens that a step gives on average if it verifies `width` tokens of each request."""
        kinds = self.acceptance(block_size).kinds
        each = [expected_tokens(kind.conditional_rates, width) for kind in kinds]
        return self.requests * sum(each) / len(each)


@dataclass(frozen=True)
class Policy:
    """How the widths of steps are chosen."""

    name: str
    steps: int
    """Steps that are counted in every phase."""
    options: dict[str, Any]
    """Options of the engine."""
    speculate: bool = True


class LastWidth(StepObserver):
    """Keeps the width of the decode step that was launched last, and whether its requests shared
    out its tokens, in which case the width is their average."""

    width, shared = 1, False

    def program(self, step: Step, inputs: tuple[Any, ...], static: dict[str, Any]) -> None:
        if step is not decode_step:
            return
        drafting, (slots, *_) = static["drafting"], inputs
        self.width, self.shared = drafting.width if drafting else 1, False
        if drafting and drafting.num_tokens:
            self.width, self.shared = drafting.num_tokens // slots.size, True


def main() -> None:
    options = parse()
    clock, begin = CompileClock(), time.perf_counter()
    pair = random_pair(options.model, options.block_size, jnp.bfloat16)
    peers = read_peers(options.anchors, options.model) if options.anchors else []
    costs = compile_and_measure_costs(options, pair)
    report: dict[str, Any] = {
        **about(),
        "model": options.model,
        "synthetic": True,
        "costs_ms": costs,
        "phases": [
            {"phase": str(phase), "tokens_per_s": {}, "emitted_per_s": {}, "longest_ms": {}}
            | ({"peers_per_s": with_steps_of(peers, phase, options.block_size)} if peers else {})
            for phase in options.phases
        ],
    }
    tell(f"weights and programs; costs {costs}", begin)
    for policy in policies(options):
        add_policy(report, policy, options, pair)
        report["seconds"], report["compile_s"] = time.perf_counter() - begin, clock.seconds
        write_json(options.json, report)  # so that a time limit leaves what was measured
        tell(policy.name, begin)
    print(table(report["phases"]))
    lost = [row["phase"] for row in report["phases"] if row["of_the_best_fixed"] < BAR]
    sys.exit(f"more than 3 % below the best fixed width: {', '.join(lost)}" if lost else None)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="qwen3-4b", choices=NAMES)
    parser.add_argument(
        "--phases",
        type=phases,
        default="4x6.5,4x1.15,32x6.5,32x1.3,4x4.24,32x7.87",
        help="requests x mean acceptance length",
    )
    parser.add_argument("--steps", type=int, default=500, help="per phase, of the adaptive policy")
    parser.add_argument("--fixed-steps", type=int, default=200, help="of the other policies")
    parser.add_argument("--block-size", type=int, default=16)
    timed = "widths whose steps are timed too, although no policy has them"
    parser.add_argument("--more-widths", type=int, nargs="+", default=[], help=timed)
    parser.add_argument("--anchors", help="JSON with other systems' step times, of blocks of 16")
    parser.add_argument("--json", help="file for the figures")
    return parser.parse_args()


def phases(text: str) -> list[Phase]:
    def lengths(text: str) -> tuple[float, float]:
        first, _, second = text.partition("+")
        return float(first), float(second or first)

    pairs = (phase.split("x") for phase in text.split(","))
    return [Phase(int(requests), lengths(length)) for requests, length in pairs]


def policies(options: argparse.Namespace) -> list[Policy]:
    """All policies. The adaptive one is the last, so that it can be compared with the others."""
    few, most = options.fixed_steps, options.steps
    narrower = [width for width in NARROWER_WIDTHS if 1 < width < options.block_size]
    return [
        Policy("plain", few, {"adaptive": False}, speculate=False),
        *(
            Policy(f"width {width}", few, {"width": width})
            for width in (*narrower, options.block_size)
        ),
        Policy("adaptive", most, {"adaptive": True}),
    ]


def build(options: argparse.Namespace, pair: Opened, **changes: Any) -> Engine:
    batches, page = sorted({phase.requests for phase in options.phases}), 64
    prefill = min(4, batches[-1])
    return Engine.from_models(
        pair.models,
        pair.params,
        method="dflash",
        max_batch=batches[-1],
        max_model_len=LONGEST,
        page_size=page,
        num_pages=batches[-1] * -(-(LONGEST + options.block_size) // page),
        prefill_chunk=FIRST_CHUNK,
        batch_sizes=tuple(batches),
        prefill_shapes=((prefill, LATER_CHUNK), (prefill, FIRST_CHUNK)),
        driver="overlapped",
        prefix_caching=False,
        compile_ahead=False,
        prefill_beside_decoding=0,
        synthetic_acceptance=options.phases[0].shares(options.block_size),
        **changes,
    )


def compile_and_measure_costs(options: argparse.Namespace, pair: Opened) -> dict[str, float]:
    """Compiles the programs, which the policies share. Returns the costs of the adaptive policy's
    steps, in which the requests share a number of tokens."""
    engine = build(options, pair, adaptive=False)
    widths = (1, *(policy.options["width"] for policy in policies(options)[1:-1]))
    plan = replace(engine.plan, widths=widths)
    compile_side_by_side(engine.programs(draws=False, plan=plan))
    del engine  # frees its pages before another engine makes its own
    engine = build(options, pair, adaptive=True)
    plan = replace(engine.plan, widths=tuple(sorted({*widths, *options.more_widths})))
    with engine.borrow_device() as device:
        costs = measure_costs(device, plan)
    return named_costs(costs)


def named_costs(costs: Costs) -> dict[str, float]:
    """Milliseconds of steps."""
    return {f"{batch} x {width}": 1e3 * cost for (batch, width), cost in costs.items()}


def with_steps_of(
    peers: Sequence[dict[str, Any]], phase: Phase, block_size: int
) -> dict[str, float]:
    """Tokens per second if whole blocks of every request took as long as in other systems."""
    tokens = phase.tokens(block_size, block_size)
    return {
        peer["system"]: 1e3 * tokens / peer["step_ms"]
        for peer in peers
        if (peer["mode"], peer["concurrency"]) == ("dflash", phase.requests)
    }


def add_policy(
    report: dict[str, Any], policy: Policy, options: argparse.Namespace, pair: Opened
) -> None:
    """Adds what a policy reaches to the rows of all phases."""
    bench = Bench(build(options, pair, **policy.options), policy)
    for row, reached in zip(report["phases"], bench.run(options.phases), strict=True):
        for rate in ("tokens_per_s", "emitted_per_s", "longest_ms"):
            row[rate][policy.name] = reached[rate]
        if policy.name == "adaptive":
            row |= {"widths": reached["widths"]} | verdict(row)
    if (adaptive := bench.engine.loop.drafters.adaptive) is not None:
        report["costs_in_loop_ms"] = named_costs(adaptive.costs)


class Given:
    """Keeps how many drafts were verified for each request in the steps whose results are read. It
    looks on while the engine tells its choice of the width, if it has one."""

    def __init__(self, engine: Engine):
        self.verified: list[tuple[int, int]] = []
        adaptive = engine.loop.drafters.adaptive
        if adaptive is not None:
            self.commit, adaptive.commit = adaptive.commit, self._noted

    def _noted(
        self, request: int, tokens: Sequence[int], num_drafts: int = 0, accepted: int = 0
    ) -> None:
        self.verified.append((request, num_drafts))
        self.commit(request, tokens, num_drafts, accepted)

    def taken(self) -> list[tuple[int, int]]:
        """Requests and their verified drafts since the last call."""
        taken, self.verified = self.verified, []
        return taken


def make_ready(engine: Engine, policy: Policy) -> None:
    """Runs every decode program that the policy may choose: the first runs of a program take longer
    than later ones. Then it keeps Python from looking through everything that tracing has left,
    which would stop the loop for half a second now and then."""
    plan = engine.plan
    widths = plan.widths or ((1, plan.width) if policy.speculate else (1,))
    with engine.borrow_device() as device:
        measure_costs(device, replace(plan, widths=widths, adapts_from=1))
    gc.collect()
    gc.freeze()


class Bench:
    """Runs a policy while requests come and go. Requests go on from one phase to the next."""

    def __init__(self, engine: Engine, policy: Policy):
        self.engine, self.policy = engine, policy
        make_ready(engine, policy)
        self.given = Given(engine)
        self.random = np.random.default_rng(0)
        self.ages: dict[int, int] = {}
        """Tokens that each live request has, its prompt included."""
        self.kinds: dict[int, int] = {}
        """Which of the phase's two mean lengths each request so far has. Half of the live requests
        have the first; the engine reads it from the request's seed."""

    def run(self, phases: Sequence[Phase]) -> Iterator[dict[str, Any]]:
        for phase in phases:
            self.engine.set_synthetic_acceptance(phase.acceptance(self.engine.plan.block_size))
            staying = self.spread_by_age(phase.requests)
            self.abort([id for id in self.ages if id not in staying])
            for age in self.spread_ages(phase.requests - len(self.ages)):
                self.submit(age)
            yield self.measure(phase)
        self.abort(list(self.ages))

    def measure(self, phase: Phase) -> dict[str, Any]:
        """Rates over steps that only decode, without the first ones after a step that did more."""
        seconds, emitted, shared, widths, steady = 0.0, 0, 0.0, Counter(), 0
        longest = 0.0
        kinds = phase.acceptance(self.engine.plan.block_size).kinds
        last = LastWidth()
        with self.engine.observe(last):
            while sum(widths.values()) < self.policy.steps:
                while len(self.ages) < phase.requests:
                    self.submit(int(self.random.integers(1, LATER_CHUNK)))
                steady = steady + 1 if self.engine.num_decoding == len(self.ages) else 0
                took, given = self.timed_step()
                verified = self.given.taken()
                if steady > SETTLING:
                    seconds += took
                    longest = max(longest, took)
                    emitted += given
                    shared += sum(
                        expected_tokens(kinds[self.kinds[id]].conditional_rates, 1 + drafts)
                        for id, drafts in verified
                    )
                    widths[last.width, last.shared] += 1
        block_size = self.engine.plan.block_size
        expected = sum(
            count * phase.tokens(width, block_size) for (width, _), count in widths.items()
        )
        return {
            "tokens_per_s": (shared if self.engine.plan.shares_tokens else expected) / seconds,
            "emitted_per_s": emitted / seconds,
            "longest_ms": 1e3 * longest,
            "widths": {
                f"{width}, shared out" if shared else str(width): count
                for (width, shared), count in sorted(widths.items())
            },
        }

    def timed_step(self) -> tuple[float, int]:
        """Seconds of one step, and the tokens whose results it read."""
        begin = time.perf_counter()
        events = self.engine.step(self.ages)
        seconds = time.perf_counter() - begin
        for event in events:
            self.ages[event.index] += len(event.token_ids)
            if event.output is not None:
                del self.ages[event.index]
        return seconds, sum(len(event.token_ids) for event in events)

    def spread_ages(self, requests: int) -> list[int]:
        """`requests` ages, spread evenly over a request's life, in random order."""
        stages = self.random.permutation(requests) + self.random.random(requests)
        return [1 + int((LONGEST - 2) * stage / requests) for stage in stages]

    def spread_by_age(self, requests: int) -> list[int]:
        """At most `requests` of the live requests, spread evenly from young to old."""
        by_age = sorted(self.ages, key=self.ages.__getitem__)
        every = max(len(by_age) // requests, 1)
        return by_age[every // 2 :: every][:requests]

    def submit(self, age: int) -> None:
        """Submits a request that has `age` tokens as its prompt, and ends at `LONGEST` tokens."""
        prompt = self.random.integers(0, self.engine.models.target.vocab_size, age).tolist()
        of_first = sum(self.kinds[id] == 0 for id in self.ages)
        kind = int(2 * of_first > len(self.ages))
        seed = 2 * len(self.kinds) + kind
        params = SamplingParams(
            LONGEST - age, ignore_eos=True, speculate=self.policy.speculate, seed=seed
        )
        id = self.engine.submit(prompt, params)
        self.ages[id], self.kinds[id] = age, kind

    def abort(self, ids: Sequence[int]) -> None:
        self.engine.abort(ids)
        for id in ids:
            del self.ages[id]


def verdict(row: dict[str, Any]) -> dict[str, Any]:
    rates = row["tokens_per_s"]
    fixed = {policy: rate for policy, rate in rates.items() if policy != "adaptive"}
    best, widest = max(fixed, key=fixed.__getitem__), list(fixed)[-1]
    return {
        "best_fixed": best,
        "of_the_best_fixed": rates["adaptive"] / fixed[best],
        f"of_{widest.replace(' ', '_')}": rates["adaptive"] / fixed[widest],
    }


def table(rows: list[dict[str, Any]]) -> str:
    policies = list(rows[0]["tokens_per_s"])
    head = "".join(f"{policy:>10}" for policy in policies)
    lines = [
        "tokens/s, SYNTHETIC acceptance",
        f"{'requests x length':<18}{head}   of the best fixed",
    ]
    for row in rows:
        rates = "".join(f"{row['tokens_per_s'][policy]:>10.0f}" for policy in policies)
        share = f"{100 * row['of_the_best_fixed']:.1f} % of {row['best_fixed']}"
        lines.append(f"{row['phase']:<18}{rates}   {share}")
        for system, rate in row.get("peers_per_s", {}).items():
            widest = rate / row["tokens_per_s"]["adaptive"]
            lines.append(f"  {system:<16}{rate:>10.0f}   {100 * widest:.1f} % of adaptive")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(cli.run(main))
