"""The picture of a benchmark. Needs the extra `plot`."""

import itertools
from collections.abc import Sequence
from typing import Any

from jaxspec.measure.drawing import COLOURS, GREY, concurrency_axis, from_zero, pyplot, save
from jaxspec.measure.results import Row, grouped, name_of

ALPHA_OF_PART = {"draft": 0.35, "verify": 0.7, "accept": 1.0}


def draw_bench(result: dict[str, Any], path: str) -> None:
    """Throughput, speedup, acceptance per position and step times of one benchmark. Below them, if
    the result has them, steps and steady decoding of other systems."""
    plt = pyplot()
    steady = result.get("steady_decode")
    figure, axes = plt.subplots(
        3 if steady else 2, 2, figsize=(11, 12 if steady else 8), layout="constrained"
    )
    rows = result["rows"]
    colours = dict(zip(grouped(rows, name_of), itertools.cycle(COLOURS)))
    figure.suptitle(_title(result), fontsize=10)
    _throughput(axes[0, 0], rows, colours)
    _speedup(axes[0, 1], rows, colours)
    _acceptance(axes[1, 0], rows, colours)
    _step_times(axes[1, 1], rows)
    if steady:
        _steps_of_all_systems(axes[2, 0], steady)
        _steady_decode(axes[2, 1], steady, colours)
    save(figure, path)
    plt.close(figure)


def _title(result: dict[str, Any]) -> str:
    note = "\nSYNTHETIC acceptance: drawn, not measured" if result["synthetic"] else ""
    return f"{result['title']}{note}"


def _throughput(axes: Any, rows: Sequence[Row], colours: dict[str, str]) -> None:
    for name, own in grouped(rows, name_of).items():
        rates = [row["output_tokens_per_s"] for row in own]
        errors = [
            [rate["median"] - rate["min"] for rate in rates],
            [rate["max"] - rate["median"] for rate in rates],
        ]
        medians = [rate["median"] for rate in rates]
        style = {"marker": "o", "capsize": 3, "color": colours[name], "label": name}
        axes.errorbar(_concurrencies(own), medians, errors, **style)
    axes.set(title="Throughput, prompts read in between", ylabel="output tokens/s")
    from_zero(axes, room=1.15)
    concurrency_axis(axes, rows)
    axes.legend(loc="upper left", fontsize=8)


def _speedup(axes: Any, rows: Sequence[Row], colours: dict[str, str]) -> None:
    axes.axhline(1, color=GREY, linewidth=1, linestyle="--")
    drafting = [row for row in rows if "speedup" in row and row["method"] != "none"]
    contenders = grouped(drafting, name_of)
    for name, own in contenders.items():
        medians = [row["speedup"]["median"] for row in own]
        axes.plot(_concurrencies(own), medians, marker="o", color=colours[name], label=name)
    if contenders:
        axes.legend(loc="upper right", fontsize=8)
    if len(contenders) <= 2:
        _label_speedups(axes, drafting)
    axes.set(title="Speedup, prompts read in between", ylabel="times plain decoding")
    axes.set_ylim(0, max(axes.get_ylim()[1], 1) * 1.2)
    concurrency_axis(axes, rows)


def _label_speedups(axes: Any, rows: Sequence[Row]) -> None:
    """Labels the points: the best of each concurrency above its point, the others below."""
    for concurrency, same in grouped(rows, lambda row: row["concurrency"]).items():
        best = max(row["speedup"]["median"] for row in same)
        for row in same:
            speedup = row["speedup"]["median"]
            axes.annotate(
                f"{speedup:.2f}x",
                (concurrency, speedup),
                (0, 7 if speedup == best else -14),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )


def _acceptance(axes: Any, rows: Sequence[Row], colours: dict[str, str]) -> None:
    """Draws every contender at its highest concurrency only, which does not change acceptance."""
    axes.set(title="Acceptance per position", xlabel="place in the block", ylabel="share of steps")
    axes.set_ylim(0, 1.3)
    axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    contenders = grouped((row for row in rows if row["speculation"]["num_spec_steps"]), name_of)
    if not contenders:
        axes.text(0.5, 0.5, "no method drafted", ha="center", transform=axes.transAxes, color=GREY)
        return
    speculation = {
        name: max(own, key=lambda row: row["concurrency"])["speculation"]
        for name, own in contenders.items()
    }
    draw = _acceptance_bars if len(contenders) <= 2 else _acceptance_lines
    draw(axes, speculation, colours)
    most = max(len(one["acceptance_rate_per_position"]) for one in speculation.values())
    axes.set_xticks(range(1, most + 1))
    axes.legend(fontsize=8, ncols=2, loc="upper left")


def _acceptance_lines(axes: Any, speculation: dict[str, Row], colours: dict[str, str]) -> None:
    for name, one in speculation.items():
        rates = one["acceptance_rate_per_position"]
        axes.plot(range(1, len(rates) + 1), rates, marker=".", color=colours[name], label=name)


def _acceptance_bars(axes: Any, speculation: dict[str, Row], colours: dict[str, str]) -> None:
    width = 0.8 / len(speculation)
    for i, (name, one) in enumerate(speculation.items()):
        rates = one["acceptance_rate_per_position"]
        shift = (i - (len(speculation) - 1) / 2) * width
        centres = [place + shift for place in range(1, len(rates) + 1)]
        axes.bar(centres, rates, width, color=colours[name], label=name)
        _conditional_acceptance(axes, one, name, colours[name])


def _conditional_acceptance(axes: Any, speculation: Row, name: str, colour: str) -> None:
    rates = enumerate(speculation["conditional_acceptance_rate_per_position"], 1)
    reached = speculation["reached_per_position"]
    points = [(place, rate) for place, rate in rates if reached[place - 1]]
    axes.plot(
        *zip(*points),
        marker=".",
        markeredgecolor="black",
        linewidth=1,
        color=colour,
        label=f"{name}, if all before were accepted",
    )


def _step_times(axes: Any, rows: Sequence[Row]) -> None:
    """Bars by concurrency, one per method, since acceptance does not change a step's time. The bars
    of drafting methods are stacked by part if the parts were timed."""
    axes.set(title="Decode step", xlabel="concurrent requests", ylabel="ms")
    concurrencies = sorted(set(_concurrencies(rows)))
    methods = grouped(rows, lambda row: row["method"])
    width = 0.8 / len(methods)
    for i, (method, own) in enumerate(methods.items()):
        colour = COLOURS[i % len(COLOURS)]
        axes.bar(0, 0, color=colour, label=f"{'plain' if method == 'none' else method} step")
        for concurrency, (row, *_) in grouped(own, lambda row: row["concurrency"]).items():
            centre = concurrencies.index(concurrency) + (i - (len(methods) - 1) / 2) * width
            _step_bar(axes, centre, width * 0.92, colour, row)
    if any(row.get("part_ms") for row in rows):
        _label_parts(axes)
    if any(row["floor_ms"] is not None for row in rows):
        axes.plot([], [], color="black", linewidth=1.5, linestyle=":", label="memory floor")
    axes.set_xticks(range(len(concurrencies)), list(map(str, concurrencies)))
    from_zero(axes, room=1.4)
    axes.legend(fontsize=8, ncols=2, loc="upper left")


def _label_parts(axes: Any) -> None:
    for part, alpha in ALPHA_OF_PART.items():
        axes.bar(0, 0, color="black", alpha=alpha, label=f"{part} alone")
    axes.plot([], [], "D", color="black", markersize=5, label="whole step in the engine")


def _step_bar(axes: Any, x: float, width: float, colour: str, row: Row) -> None:
    """A bar for the step, or a stack of its parts with a mark for the whole step, and a line for
    the floor."""
    bottom = 0.0
    for part, value in (row.get("part_ms") or {}).items():
        axes.bar(x, value, width, bottom, color=colour, alpha=ALPHA_OF_PART[part])
        bottom += value
    if row["step_ms"] and bottom:
        axes.plot(x, row["step_ms"]["p50"], "D", color="black", markersize=5)
    elif row["step_ms"]:
        axes.bar(x, row["step_ms"]["p50"], width, color=colour)
    if row["floor_ms"] is not None:
        floor = [row["floor_ms"]] * 2
        axes.plot(
            [x - width / 2, x + width / 2], floor, color="black", linewidth=1.5, linestyle=":"
        )


def _steps_of_all_systems(axes: Any, steady: Sequence[Row]) -> None:
    """A colour per system; plain decoding dashed, drafting solid."""
    style = lambda mode: "--" if mode == "plain" else "-"
    systems = grouped(steady, lambda row: row["system"])
    for (system, own), colour in zip(systems.items(), itertools.cycle(COLOURS)):
        axes.plot([], [], color=colour, label=system)
        for mode, same in grouped(own, lambda row: row["mode"]).items():
            steps = {row["concurrency"]: row["step_ms"] for row in same}
            axes.plot(*zip(*steps.items()), style(mode), marker=".", color=colour)
    for mode in sorted({row["mode"] for row in steady}):
        axes.plot([], [], style(mode), color="black", label=mode)
    axes.set(title="Decode step, all systems", ylabel="ms")
    from_zero(axes, room=1.1)
    concurrency_axis(axes, steady)
    axes.legend(fontsize=8, ncols=2, loc="upper left")


def _steady_decode(axes: Any, steady: Sequence[Row], colours: dict[str, str]) -> None:
    """Draws our rates as lines, and the best other system at the same acceptance as crosses."""
    for name, own in grouped(steady, lambda row: row["name"]).items():
        ours = {r["concurrency"]: r["tokens_per_s"] for r in own if r["system"] == "jaxspec"}
        others = grouped((r for r in own if r["system"] != "jaxspec"), lambda r: r["concurrency"])
        axes.plot(*zip(*ours.items()), marker="o", color=colours[name], label=name)
        for concurrency, same in others.items():
            best = max(row["tokens_per_s"] for row in same)
            axes.plot(concurrency, best, "x", color=colours[name], markersize=8)
    axes.plot([], [], "x", color="black", label="best of the others")
    axes.set(title="Steady decode: concurrency x length / step", ylabel="tokens/s")
    from_zero(axes, room=1.1)
    concurrency_axis(axes, steady)
    axes.legend(fontsize=8, loc="upper left")


def _concurrencies(rows: Sequence[Row]) -> list[int]:
    return [row["concurrency"] for row in rows]
