"""What verifying fewer drafts could gain in a large batch, and how much of it the engine gains.

It is a calculation from measured step times, without a device:

    python scripts/verify_budget.py --json docs/results/verify-budget.json

Half of the requests have GSM8K's mean acceptance length, half MT-Bench's, with one acceptance rate
for all positions of a block. A policy that knows these rates, and nothing about a single draft
before it is verified, can do no better than to verify the drafts with the largest chances. So for
each number of tokens that a step verifies, there is a largest number of tokens that it emits, and a
longest time that it may take.

A step of many requests that verifies few tokens was not timed. Its least time is that of a timed
step that verifies as many tokens with fewer requests, plus the work for the other requests:
drafting at the rate of a large product, and reading keys and values at the rate of a large copy. No
other losses are added, so the true time is longer.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int
from measuring import about, write_json

from jaxspec.acceptance.outcomes import after_step, survival
from jaxspec.acceptance.shares import expected_tokens, shared_out
from jaxspec.acceptance.synthetic import from_length
from jaxspec.engine.adapt.drafted import drafted_width
from jaxspec.engine.adapt.even import Width, tokens_each
from jaxspec.engine.adapt.width import AdaptiveWidth

RESULTS = Path(__file__).parents[1] / "docs" / "results"
GSM8K, MT_BENCH = 6.54, 4.24
DRAFTS, STEPS = 15, 300
WANTED = 1.25
"""The speed that is wanted, as a multiple of that of steps that verify whole blocks."""
FLOPS, BYTES = 798e12, 2.95e12
"""FLOPs of a large bfloat16 product and bytes of a large copy, per second on an H100."""
LAYER, HEAD, LAYERS, DRAFTER_LAYERS = 192.9e6, 622.3e6, 36, 5
"""Weights of a layer and of the head of Qwen3-8B, and how many layers it and its drafter have."""
CACHED = 2 * 8 * 128 * 2
"""Bytes of the keys and values of one token in one layer."""
CONTEXT = 512
"""The fewest tokens of a context when the steps were timed."""

Times = Mapping[tuple[int, Width], float]
"""Milliseconds of a step, by batch size and width. It verifies their product of tokens."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--json", help="file for the figures")
    options = parser.parse_args()
    times = least_times(timed("steps-8b-h100"))
    report = {**about(), "least_step_ms": named(times), "batches": [], "engine": []}
    for batch in (8, 16, 32):
        report["batches"].append({"batch": batch, "rows": rows_of(batch, times)})
        report["engine"].append({"batch": batch, **engine_speed(batch, times)})
    write_json(options.json, report)
    print(table(report))


def timed(name: str) -> dict[int, tuple[float, float]]:
    """Milliseconds of steps that verify whole blocks and of plain steps, by batch size."""
    rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return {row["concurrency"]: (row["dflash_engine_ms"], row["plain_engine_ms"]) for row in rows}


def least_times(timed: Mapping[int, tuple[float, float]], block: int = DRAFTS + 1) -> Times:
    """The least times of steps of these batch sizes, at the widths of an adaptive engine."""
    times = {}
    for batch, (whole, plain) in timed.items():
        times |= {(batch, 1): plain, (batch, block): whole}
        for width in (4, 8):
            if (fewer := batch * width // block) in timed:
                times[batch, width] = timed[fewer][0] + added_by(batch - fewer, block)
    return times


def added_by(requests: int, block: int) -> float:
    """The least milliseconds that `requests` more requests add if no more tokens are verified."""
    weights = DRAFTER_LAYERS * LAYER + HEAD
    drafting = requests * block * 2 * weights / FLOPS
    reading = requests * CONTEXT * CACHED * (LAYERS + DRAFTER_LAYERS) / BYTES
    return 1e3 * (drafting + reading)


def rows_of(batch: int, times: Times) -> list[dict[str, Any]]:
    """For several numbers of verified tokens: the most emitted tokens, and the longest time."""
    whole = best_tokens(batch, batch * (DRAFTS + 1)) / times[batch, DRAFTS + 1]
    rows = []
    for tokens in sorted({batch * width for width in (4, 6, 8, 9, 10, 11, 12, 14, 16)}):
        emitted = best_tokens(batch, tokens)
        row = {"verified": tokens, "emitted": emitted, "longest_ms": emitted / (WANTED * whole)}
        if (least := times.get((batch, tokens // batch))) is not None and tokens % batch == 0:
            row |= {"least_ms": least, "of_whole_blocks": emitted / least / whole}
        rows.append(row)
    return rows


def best_tokens(
    batch: int, verified: int, lengths: tuple[float, float] = (GSM8K, MT_BENCH)
) -> float:
    """The most tokens that a step emits on average if every request's rate is known."""
    chances = np.cumprod(rates_of(batch, lengths), axis=1)
    return expected_tokens(chances, verified - batch)


def rates_of(batch: int, lengths: tuple[float, float]) -> Float[np.ndarray, "batch drafts"]:
    kinds = [from_length(length, DRAFTS).conditional_rates for length in lengths]
    return np.array([kinds[request % 2] for request in range(batch)])


class Load:
    """Requests of two kinds, which never end."""

    def __init__(self, batch: int, lengths: tuple[float, float], times: Times):
        self.batch, self.times, self.rates = batch, times, rates_of(batch, lengths)
        self.random = np.random.default_rng(0)
        self.milliseconds, self.tokens = 0.0, 0

    def step(
        self, width: Width, num_drafts: Int[np.ndarray, " batch"]
    ) -> Int[np.ndarray, " batch"]:
        """Runs a step, and returns how many drafts of each request are accepted."""
        right = np.cumprod(self.random.random(self.rates.shape) < self.rates, axis=1).sum(axis=1)
        accepted = np.minimum(right, num_drafts)
        self.milliseconds += self.times[self.batch, width]
        self.tokens += int(accepted.sum()) + self.batch
        return accepted

    @property
    def speed(self) -> float:
        """Tokens per millisecond."""
        return self.tokens / self.milliseconds


def fixed(batch: int, lengths: tuple[float, float], width: int, times: Times) -> float:
    """The speed of steps of one width."""
    load = Load(batch, lengths, times)
    for _ in range(STEPS):
        load.step(width, np.full(batch, width - 1))
    return load.speed


def shared(batch: int, lengths: tuple[float, float], times: Times) -> float:
    """The speed of the engine's policy: the host chooses the width from the results of the step
    before the last, and the device shares the tokens out among the requests."""
    seconds = {key: value for key, value in times.items() if key[0] == batch}
    load, adaptive = Load(batch, lengths, times), AdaptiveWidth(seconds, shares_tokens=True)
    tried = kept = np.zeros((batch, DRAFTS), np.float32)
    late: list[tuple[Width, np.ndarray, np.ndarray]] = []
    for request in range(batch):
        adaptive.commit(request, ())
    for _ in range(STEPS):
        width = adaptive.width(batch, range(batch))
        most = tokens_each(width) - 1
        num_drafts = np.full(batch, most)
        if isinstance(width, int) and 0 < most < DRAFTS:
            num_drafts = np.full(batch, drafted_width(width, DRAFTS + 1) - 1)
            chances = jnp.asarray(survival(tried, kept))
            budget = jnp.array(batch * (width - 1))
            num_drafts = np.asarray(shared_out(chances, jnp.asarray(num_drafts), budget))
        accepted = load.step(width, num_drafts)
        tried, kept = after_step(tried, kept, num_drafts, accepted)
        late.append((width, num_drafts, accepted))
        if len(late) > 1:
            read, *of_requests = late.pop(0)
            adaptive.note_time((batch, read), 0.0, 0.0, False)  # no time that it could learn from
            for request, (drafts, right) in enumerate(zip(*map(np.ndarray.tolist, of_requests))):
                adaptive.commit(request, (), drafts, right)
    return load.speed


def engine_speed(batch: int, times: Times) -> dict[str, Any]:
    """The engine's speed on several loads, relative to whole blocks and to the best fixed width."""
    widths = [width for size, width in times if size == batch and isinstance(width, int)]
    report = {}
    for lengths in ((GSM8K, MT_BENCH), (6.4, 3.0), (7.87, 7.87), (GSM8K, GSM8K), (1.3, 1.3)):
        equal = {width: fixed(batch, lengths, width, times) for width in widths}
        speed = shared(batch, lengths, times)
        report[f"{lengths[0]:g}+{lengths[1]:g}"] = {
            "of_whole_blocks": speed / equal[DRAFTS + 1],
            "of_best_fixed": speed / max(equal.values()),
        }
    return {"loads": report}


def named(times: Times) -> dict[str, float]:
    return {f"{batch} x {width}": time for (batch, width), time in sorted(times.items())}


def table(report: Mapping[str, Any]) -> str:
    lines = [f"half {GSM8K}, half {MT_BENCH}; least step times {report['least_step_ms']}"]
    for of_batch, engine in zip(report["batches"], report["engine"], strict=True):
        lines.append(f"{of_batch['batch']} requests: verified, emitted, longest ms, least ms, gain")
        lines += [_line(row) for row in of_batch["rows"]]
        lines += [
            f"  the engine, {load}: {gain['of_whole_blocks']:.2f} of whole blocks, "
            f"{gain['of_best_fixed']:.2f} of the best fixed width"
            for load, gain in engine["loads"].items()
        ]
    return "\n".join(lines)


def _line(row: Mapping[str, Any]) -> str:
    text = f"  {row['verified']:4d} {row['emitted']:7.1f} {row['longest_ms']:7.2f}"
    if "least_ms" not in row:
        return text
    return f"{text} {row['least_ms']:7.2f} {row['of_whole_blocks']:6.2f}"


if __name__ == "__main__":
    main()
