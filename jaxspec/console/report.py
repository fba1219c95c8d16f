"""Statistics of finished requests, as lines for a person and as objects for a program."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from jaxspec.engine.requests.output import RequestOutput
from jaxspec.engine.stats.acceptance import AcceptanceCounts, PooledStats, pool


def output_object(prompt: Any, output: RequestOutput) -> dict[str, Any]:
    """One request as JSON; acceptance statistics have vLLM's names and meanings."""
    as_json = {
        "prompt": prompt,
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "error": output.error,
        "stats": stats_object(output.stats),
    }
    if output.logprobs is not None:
        as_json["logprobs"] = [dict(token) for token in output.logprobs]
    return as_json


def output_lines(
    prompts: Sequence[Any], outputs: Sequence[RequestOutput], made_with: dict[str, Any]
) -> list[str]:
    """A line of JSON for each prompt, with everything that is needed to repeat the run."""
    return [
        json.dumps(output_object(prompt, output) | {"environment": made_with})
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def stats_object(stats: AcceptanceCounts) -> dict[str, Any]:
    """Every field and every ratio of the statistics, by its name."""
    ratios = (name for name in dir(type(stats)) if isinstance(getattr(type(stats), name), property))
    return dataclasses.asdict(stats) | {name: getattr(stats, name) for name in ratios}


PLACES = 5
"""For how many positions of a block, from the first on, the share of accepted drafts is printed;
--json has all of them."""


@dataclasses.dataclass(frozen=True)
class RunTimes:
    """How long a run took. No second is counted in two of these fields."""

    seconds: float
    """Reading the prompts and decoding."""
    start_s: float
    """Everything before that: imports, reading weights, making programs ready."""
    late_programs: int = 0
    """Programs that were not ready when the run needed them."""
    late_s: float = 0.0
    """Seconds that the run waited for these programs."""
    tokens_per_s: float | None = None
    """Tokens after the first of each prompt, per second; None if there were none."""
    plain_tokens_per_s: float | None = None
    """The same rate in plain decoding of the same prompts; None if it was not measured."""
    plain_tokens: int = 0
    """Tokens from which the rate of plain decoding was measured."""


def summary(outputs: Sequence[RequestOutput], times: RunTimes) -> list[str]:
    """The statistics of a run, as lines to print."""
    pooled = pool(output.stats for output in outputs)
    compared = _compared(times)
    rate = (
        "" if compared else f", {pooled.generation_tokens / max(times.seconds, 1e-9):.0f} tokens/s"
    )
    of = f" for {len(outputs)} prompts" if len(outputs) > 1 else ""
    return [
        f"{pooled.generation_tokens} tokens{of} in {times.seconds:.2f} s{rate}",
        *_passes(outputs, pooled),
        *compared,
        *speculation_line(pooled),
        *_waits(times),
    ]


def passes(output: RequestOutput) -> int:
    """Forward passes of the target that gave tokens to a request. The first one is the pass that
    ends the reading of the prompt."""
    return len(output.stats.itl_s) + 1 if output.token_ids else 0


def _passes(outputs: Sequence[RequestOutput], pooled: PooledStats) -> list[str]:
    count = sum(map(passes, outputs))
    if not count:
        return []
    plain = "" if not pooled.num_spec_steps else " (plain decoding: 1.00)"
    per_pass = pooled.generation_tokens / count
    return [f"{count} passes of the target model, {per_pass:.2f} tokens per pass{plain}"]


def _compared(times: RunTimes) -> list[str]:
    own, plain = times.tokens_per_s, times.plain_tokens_per_s
    if own is None or plain is None:
        return []
    ratio, rates = own / plain, f"{own:.0f} against {plain:.0f} tokens/s"
    measured = f"measured with {times.plain_tokens} tokens"
    if ratio < 1:
        return [
            f"slower than plain decoding: {ratio:.2f} times its speed ({rates}, {measured}): "
            "a pass that checks drafts takes longer, and too few drafts were right"
        ]
    return [f"{ratio:.2f} times as fast as plain decoding ({rates}, {measured})"]


def _waits(times: RunTimes) -> list[str]:
    late = ""
    if times.late_programs:
        late = f", and {times.late_s:.1f} s for {times.late_programs} programs in between"
    return [f"not counted: {times.start_s:.1f} s to start{late}"]


def speculation_line(pooled: PooledStats) -> list[str]:
    """The line with the acceptance of all requests together; no line for plain decoding."""
    if not pooled.num_spec_steps:
        return []
    places = min(sum(count > 0 for count in pooled.drafted_per_position), PLACES)
    rates = ", ".join(f"{rate:.2f}" for rate in pooled.acceptance_rate_per_position[:places])
    drawn = "SYNTHETIC (drawn, not measured): " if pooled.synthetic else ""
    return [
        f"{drawn}{pooled.num_accepted_draft_tokens} of {pooled.num_draft_tokens} drafts accepted; "
        f"mean acceptance length {pooled.mean_acceptance_length:.2f}; share accepted at place 1 to "
        f"{places}: {rates}"
    ]
