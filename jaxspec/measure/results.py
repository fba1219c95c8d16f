"""The results of a benchmark: a row for each method and concurrency, and tables of the rows."""

import os
import statistics
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxspec.console.report import stats_object
from jaxspec.engine.stats.acceptance import RequestStats, pool
from jaxspec.measure.floor import StepBytes
from jaxspec.measure.load import Run, Schedule

Row = dict[str, Any]
"""The figures of one line of a table, by their names in the JSON file."""

PERCENTILES = (50, 90, 99)
COMPILE_S_WORTH_A_WARNING = 0.1
"""The report has a warning if more seconds of compiling than these fell into measured passes."""


def row_of(
    concurrency: int, runs: Sequence[Run], least: StepBytes, bytes_per_second: float | None
) -> Row:
    """The row of a contender: medians over the passes, percentiles over all of their requests, and
    the sums of their counts. If there is no bandwidth, there is no floor."""
    outputs = [output for run in runs for output in run.outputs]
    stats = [output.stats for output in outputs]
    least_bytes = least.of_step(concurrency, _mean_context(stats))
    floor_ms = 1e3 * least_bytes / bytes_per_second if bytes_per_second else None
    return {
        "concurrency": concurrency,
        "passes": len(runs),
        **_throughput(runs),
        **_steps(runs, floor_ms),
        **_latencies(stats),
        "finish_reasons": _counted([output.finish_reason for output in outputs]),
        "speculation": stats_object(pool(stats)),
    }


def _throughput(runs: Sequence[Run]) -> Row:
    rates = [_tokens(run) / run.seconds for run in runs]
    return {
        "seconds": [run.seconds for run in runs],
        "pass_tokens_per_s": rates,
        "output_tokens_per_s": _spread(rates),
    }


def _steps(runs: Sequence[Run], floor_ms: float | None) -> Row:
    steps = percentiles([1e3 * step for run in runs for step in run.step_s])
    fraction = floor_ms / steps["p50"] if steps and floor_ms is not None else None
    return {"step_ms": steps, "floor_ms": floor_ms, "floor_fraction": fraction}


def _latencies(stats: Sequence[RequestStats]) -> Row:
    milliseconds = lambda seconds: percentiles([1e3 * one for one in seconds])
    return {
        "ttft_ms": milliseconds(one.ttft_s for one in stats),
        "tpot_ms": milliseconds(one.tpot_s for one in stats if one.generation_tokens > 1),
        "itl_ms": milliseconds(gap for one in stats for gap in one.itl_s),
        "queue_ms": milliseconds(one.queue_s for one in stats),
    }


def name_of(row: Row) -> str:
    """Name of the contender: its method, and the name of its synthetic acceptance, if any."""
    method = "plain" if row["method"] == "none" else row["method"]
    return f"{method} {row.get('acceptance_of', '')}".rstrip()


def grouped[Key: Hashable](rows: Iterable[Row], key: Callable[[Row], Key]) -> dict[Key, list[Row]]:
    """The rows by key. Keys are in the order in which they first occur."""
    groups: dict[Key, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def add_speedups(rows: Sequence[Row], baseline: str) -> None:
    """Adds to each row its rate over the baseline's in the same pass, at the same concurrency."""
    base = {row["concurrency"]: row for row in rows if row["method"] == baseline}
    for row in rows:
        if row["concurrency"] in base:
            pairs = zip(row["pass_tokens_per_s"], base[row["concurrency"]]["pass_tokens_per_s"])
            row["speedup"] = _spread([rate / of_base for rate, of_base in pairs])


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Percentiles by name; empty if there are no values."""
    if not values:
        return {}
    measured = np.percentile(values, PERCENTILES)
    return {f"p{p}": float(value) for p, value in zip(PERCENTILES, measured)}


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _tokens(run: Run) -> int:
    return sum(output.stats.generation_tokens for output in run.outputs)


def _mean_context(stats: Sequence[RequestStats]) -> float:
    """Mean context length over tokens: that of a step in the middle of the average request."""
    return statistics.fmean(one.prompt_tokens + one.generation_tokens / 2 for one in stats)


def _counted(names: Sequence[str]) -> dict[str, int]:
    return {name: names.count(name) for name in sorted(set(names))}


def report(result: dict[str, Any]) -> list[str]:
    """The whole result as text: what ran, the tables, and warnings."""
    lines = [result["title"], table(result["rows"])]
    if "steady_decode" in result:
        lines += steady_table(result["steady_decode"])
    return [*lines, *_warnings(result)]


def title(model: str, dataset: str, adaptive: bool, schedule: Schedule) -> str:
    """The model, requests and device of a benchmark, in one line."""
    work = schedule.work
    shortest, longest = (pick(len(one.prompt) for one in work) for pick in (min, max))
    lengths = f"{longest}" if shortest == longest else f"{shortest}-{longest}"
    most = max(one.params.max_tokens for one in work)
    temperature, rate = work[0].params.temperature, schedule.request_rate
    return (
        f"{model} on {jax.devices()[0].device_kind}: {len(work)} {os.path.basename(dataset)} "
        f"prompts of {lengths} tokens, up to {most} out, "
        + (f"temperature {temperature:g}" if temperature else "greedy")
        + (f", {rate:g} requests/s" if rate else "")
        + (", adaptive width" if adaptive else "")
        + f", passes: {schedule.passes}"
    )


def _warnings(result: dict[str, Any]) -> Iterator[str]:
    rows = result["rows"]
    if result["synthetic"]:
        yield "* SYNTHETIC acceptance: drawn, not measured; it does not describe the drafter"
    for row in rows:
        if row.get("speedup", {}).get("median", 1) < 1:
            concurrency = row["concurrency"]
            yield f"{name_of(row)} is slower than plain decoding at concurrency {concurrency}"
    compile_s = sum(row["compile_s_while_measured"] for row in rows)
    if compile_s > COMPILE_S_WORTH_A_WARNING:
        yield f"warning: {compile_s:.1f} s of compiling fell into the measured passes"


FLOOR = ("", "floor")
HEADINGS = (
    ("", "conc"),
    ("", "method"),
    ("output", "tok/s"),
    ("", "speedup"),
    ("", "accept"),
    ("step ms", "p50/p90/p99"),
    FLOOR,
    ("TTFT ms", "p50/p99"),
    ("TPOT ms", "p50/p99"),
)


def table(rows: Sequence[Row]) -> str:
    """The table of the rows. `accept` is the mean acceptance length, and `floor` the share of the
    memory bandwidth. The column `floor` is left out if no row has a value, as on a CPU."""
    lines = [*map(list, zip(*HEADINGS)), *map(_cells, rows)]
    if all(row["floor_fraction"] is None for row in rows):
        without = HEADINGS.index(FLOOR)
        lines = [line[:without] + line[without + 1 :] for line in lines]
    return "\n".join(aligned(lines))


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Formats lines of cells, with every column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*lines)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in lines]


def _cells(row: Row) -> list[str]:
    rate, speculation = row["output_tokens_per_s"], row["speculation"]
    speculates = speculation["num_spec_steps"] > 0
    mark = "*" if speculation["synthetic"] else ""
    fraction = row["floor_fraction"]
    return [
        str(row["concurrency"]),
        name_of(row),
        f"{rate['median']:.1f}",
        f"{row['speedup']['median']:.2f}x" if "speedup" in row else "-",
        f"{speculation['mean_acceptance_length']:.2f}{mark}" if speculates else "-",
        _joined(row["step_ms"], ("p50", "p90", "p99")),
        f"{100 * fraction:.0f}%" if fraction is not None else "-",
        _joined(row["ttft_ms"], ("p50", "p99")),
        _joined(row["tpot_ms"], ("p50", "p99")),
    ]


def _joined(figures: dict[str, float], names: Sequence[str]) -> str:
    return "/".join(_short(figures[name]) for name in names) if figures else "-"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def steady_table(rows: Sequence[Row]) -> list[str]:
    """The table of `peers.steady_decode`: a line per concurrency and system, a column per
    contender."""
    names = {row["name"]: row["acceptance_of"] or row["name"] for row in rows}
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    lines = [
        ["", "", *("step ms" for _ in modes), *("tok/s" for _ in names)],
        ["conc", "system", *modes, *names.values()],
    ]
    systems = grouped(rows, lambda row: (row["concurrency"], row["system"]))
    for (concurrency, system), own in systems.items():
        cells = _steady_cells(own, modes, list(names))
        lines.append([str(concurrency), system, *cells])
    return ["steady decode: tokens/s = concurrency x acceptance length / step", *aligned(lines)]


def _steady_cells(rows: Sequence[Row], modes: Sequence[str], names: Sequence[str]) -> list[str]:
    steps = {row["mode"]: f"{row['step_ms']:.2f}" for row in rows}
    rates = {row["name"]: f"{row['tokens_per_s']:.0f}" for row in rows}
    return [steps.get(mode, "-") for mode in modes] + [rates.get(name, "-") for name in names]
