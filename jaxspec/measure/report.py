"""A benchmark's result for a person: what ran, the table, and what to beware of."""

import os
from collections.abc import Iterator
from typing import Any

import jax

from jaxspec.measure.comparison import Schedule
from jaxspec.measure.peers import peer_table
from jaxspec.measure.results import name_of, table

WORTH_A_WARNING_S = 0.1
"""Of compiling that fell into measured passes."""


def title(model: str, dataset: str, adaptive: bool, schedule: Schedule) -> str:
    """What ran where, in one line."""
    work = schedule.work
    shortest, longest = (pick(len(one.prompt) for one in work) for pick in (min, max))
    span = f"{longest}" if shortest == longest else f"{shortest}-{longest}"
    most = max(one.params.max_tokens for one in work)
    temperature, rate = work[0].params.temperature, schedule.request_rate
    return (
        f"{model} on {jax.devices()[0].device_kind}: {len(work)} {os.path.basename(dataset)} "
        f"prompts of {span} tokens, up to {most} out, "
        + (f"temperature {temperature:g}" if temperature else "greedy")
        + (f", {rate:g} requests/s" if rate else "")
        + (", adaptive spans" if adaptive else "")
        + f", passes: {schedule.passes}"
    )


def in_words(result: dict[str, Any]) -> list[str]:
    lines = [result["title"], table(result["rows"])]
    if "steady_decode" in result:
        lines += peer_table(result["steady_decode"])
    return [*lines, *_caveats(result)]


def _caveats(result: dict[str, Any]) -> Iterator[str]:
    rows = result["rows"]
    if result["synthetic"]:
        yield "* SYNTHETIC acceptance: drawn, not found; it says nothing of the drafter"
    for row in rows:
        if row.get("speedup", {}).get("median", 1) < 1:
            at = row["concurrency"]
            yield f"{name_of(row)} is slower than plain decoding at concurrency {at}"
    late = sum(row["compile_s_while_measured"] for row in rows)
    if late > WORTH_A_WARNING_S:
        yield f"warning: {late:.1f} s of compiling fell into the measured passes"
