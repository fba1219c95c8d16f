"""Statistics of finished requests, as lines for a person and as objects for a program."""

import dataclasses
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


def stats_object(stats: AcceptanceCounts) -> dict[str, Any]:
    """Every field and every ratio of the statistics, by its name."""
    ratios = (name for name in dir(type(stats)) if isinstance(getattr(type(stats), name), property))
    return dataclasses.asdict(stats) | {name: getattr(stats, name) for name in ratios}


def summary(outputs: Sequence[RequestOutput], seconds: float, compile_s: float) -> list[str]:
    """The statistics of a run, as lines to print. `seconds` does not include compiling."""
    pooled = pool(output.stats for output in outputs)
    rate = pooled.generation_tokens / max(seconds, 1e-9)
    lines = [
        f"Prompt: {pooled.prompt_tokens} tokens",
        f"Generation: {pooled.generation_tokens} tokens in {seconds:.2f} s, "
        f"{rate:.1f} tokens/s (including prompt reading)",
        f"Compilation: {compile_s:.2f} s, not counted above",
    ]
    return lines + speculation_line(pooled)


def speculation_line(pooled: PooledStats) -> list[str]:
    """The line with the acceptance of all requests together; no line for plain decoding."""
    if not pooled.num_spec_steps:
        return []
    drafted = sum(count > 0 for count in pooled.drafted_per_position)
    rates = pooled.acceptance_rate_per_position[:drafted]
    per_position = ", ".join(f"{rate:.3f}" for rate in rates)
    drawn = "SYNTHETIC (drawn, not measured): " if pooled.synthetic else ""
    return [
        f"{drawn}draft acceptance = {pooled.draft_acceptance_rate:.5f} "
        f"({pooled.num_accepted_draft_tokens} accepted / {pooled.num_draft_tokens} drafted), "
        f"mean acceptance length = {pooled.mean_acceptance_length:.2f}, "
        f"acceptance rate per position = ({per_position})"
    ]
