"""Statistics of finished requests: lines for a person, objects for a program."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxspec.engine.output import RequestOutput
from jaxspec.engine.stats import RequestStats


def output_object(prompt: Any, output: RequestOutput) -> dict[str, Any]:
    """One request as JSON; acceptance statistics carry vLLM's names and meanings."""
    found = {
        "prompt": prompt,
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "error": output.error,
        "stats": stats_object(output.stats),
    }
    if output.logprobs is not None:
        found["logprobs"] = [dict(token) for token in output.logprobs]
    return found


def stats_object(stats: RequestStats) -> dict[str, Any]:
    return {
        **dataclasses.asdict(stats),
        "num_spec_steps": stats.num_spec_steps,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "draft_acceptance_rate": stats.draft_acceptance_rate,
        "acceptance_rate_per_position": stats.acceptance_rate_per_position,
    }


def summary(outputs: Sequence[RequestOutput], seconds: float, compile_s: float) -> list[str]:
    """What a person wants to know of a run, line by line."""
    stats = [output.stats for output in outputs]
    prompt = sum(s.prompt_tokens for s in stats)
    generated = sum(s.generation_tokens for s in stats)
    rate = generated / max(seconds - compile_s, 1e-9)
    lines = [
        f"Prompt: {prompt} tokens",
        f"Generation: {generated} tokens in {seconds - compile_s:.2f} s, {rate:.1f} tokens/s "
        "(prompt reading counted)",
        f"Compilation: {compile_s:.2f} s, not counted above",
    ]
    return lines + _speculation(stats)


def _speculation(stats: Sequence[RequestStats]) -> list[str]:
    """The pooled acceptance line; nothing for plain decoding."""
    steps = sum(s.num_spec_steps for s in stats)
    if not steps:
        return []
    drafted = sum(s.num_draft_tokens for s in stats)
    accepted = sum(s.num_accepted_draft_tokens for s in stats)
    places = zip(*(s.accepted_per_position for s in stats))
    per_position = ", ".join(f"{sum(counts) / steps:.3f}" for counts in places)
    return [
        f"draft acceptance = {accepted / drafted:.5f} ({accepted} accepted / {drafted} drafted), "
        f"mean acceptance length = {1 + accepted / steps:.2f}, "
        f"acceptance rate per position = ({per_position})"
    ]
