"""Rows of a benchmark: a method at a concurrency, over several passes."""

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxspec.console.report import stats_object
from jaxspec.engine.stats.acceptance import pool
from jaxspec.measure.floor import StepBytes
from jaxspec.measure.load import Run

PERCENTILES = (50, 90, 99)


def row_of(
    concurrency: int, runs: Sequence[Run], least: StepBytes, bytes_per_second: float
) -> dict[str, Any]:
    """Medians over the passes, percentiles over all of their requests, counts pooled."""
    stats = [output.stats for run in runs for output in run.outputs]
    rates = [_tokens(run) / run.seconds for run in runs]
    steps = percentiles([1e3 * step for run in runs for step in run.step_s])
    floor_ms = 1e3 * least.of_step(concurrency, _mean_context(stats)) / bytes_per_second
    return {
        "concurrency": concurrency,
        "passes": len(runs),
        "seconds": [run.seconds for run in runs],
        "pass_tokens_per_s": rates,
        "output_tokens_per_s": {
            "median": statistics.median(rates),
            "min": min(rates),
            "max": max(rates),
        },
        "step_ms": steps,
        "floor_ms": floor_ms,
        "floor_fraction": floor_ms / steps["p50"] if steps else None,
        "ttft_ms": percentiles([1e3 * one.ttft_s for one in stats]),
        "tpot_ms": percentiles([1e3 * one.tpot_s for one in stats if one.generation_tokens > 1]),
        "itl_ms": percentiles([1e3 * gap for one in stats for gap in one.itl_s]),
        "queue_ms": percentiles([1e3 * one.queue_s for one in stats]),
        "finish_reasons": _counted([o.finish_reason for run in runs for o in run.outputs]),
        "speculation": stats_object(pool(stats)),
    }


def name_of(row: dict[str, Any]) -> str:
    """Of the contender: its method, and what its drawn acceptance is of."""
    method = "plain" if row["method"] == "none" else row["method"]
    return f"{method} {row.get('acceptance_of', '')}".rstrip()


def add_speedups(rows: Sequence[dict[str, Any]], baseline: str) -> None:
    """Per row the ratio to the baseline's rate in the same pass at the same concurrency."""
    base = {row["concurrency"]: row for row in rows if row["method"] == baseline}
    for row in rows:
        if row["concurrency"] in base:
            pairs = zip(row["pass_tokens_per_s"], base[row["concurrency"]]["pass_tokens_per_s"])
            ratios = [ours / theirs for ours, theirs in pairs]
            row["speedup"] = {
                "median": statistics.median(ratios),
                "min": min(ratios),
                "max": max(ratios),
            }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Empty where nothing was measured."""
    if not values:
        return {}
    found = np.percentile(values, PERCENTILES)
    return {f"p{p}": float(value) for p, value in zip(PERCENTILES, found)}


def _tokens(run: Run) -> int:
    return sum(output.stats.generation_tokens for output in run.outputs)


def _mean_context(stats: Sequence[Any]) -> float:
    """Positions behind the average token: a step in the middle of the average request."""
    return statistics.fmean(one.prompt_tokens + one.generation_tokens / 2 for one in stats)


def _counted(names: Sequence[str]) -> dict[str, int]:
    return {name: names.count(name) for name in sorted(set(names))}


HEADINGS = (
    ("", "conc"),
    ("", "method"),
    ("output", "tok/s"),
    ("", "speedup"),
    ("", "accept"),
    ("step ms", "p50/p90/p99"),
    ("", "floor"),
    ("TTFT ms", "p50/p99"),
    ("TPOT ms", "p50/p99"),
)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """For a person; `accept` is the mean acceptance length, `floor` the share of the bandwidth."""
    return "\n".join(aligned([*map(list, zip(*HEADINGS)), *map(_cells, rows)]))


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in lines]


def _cells(row: dict[str, Any]) -> list[str]:
    rate, speculation = row["output_tokens_per_s"], row["speculation"]
    speculates = speculation["num_spec_steps"] > 0
    drawn = "*" if speculation["synthetic"] else ""
    fraction = row["floor_fraction"]
    return [
        str(row["concurrency"]),
        name_of(row),
        f"{rate['median']:.1f}",
        f"{row['speedup']['median']:.2f}x" if "speedup" in row else "-",
        f"{speculation['mean_acceptance_length']:.2f}{drawn}" if speculates else "-",
        _joined(row["step_ms"], ("p50", "p90", "p99")),
        f"{100 * fraction:.0f}%" if fraction is not None else "-",
        _joined(row["ttft_ms"], ("p50", "p99")),
        _joined(row["tpot_ms"], ("p50", "p99")),
    ]


def _joined(found: dict[str, float], names: Sequence[str]) -> str:
    return "/".join(_short(found[name]) for name in names) if found else "-"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
