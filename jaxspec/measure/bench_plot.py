"""The picture of a benchmark. Needs the extra `plot`."""

import itertools
from collections.abc import Sequence
from typing import Any

from jaxspec.measure.plots import COLOURS, GREY, concurrency_axis, from_zero, pyplot, save
from jaxspec.measure.results import name_of
from jaxspec.measure.steady_plot import draw_steady_decode, draw_steps_of_all

ALPHA_OF_PART = {"draft": 0.35, "verify": 0.7, "accept": 1.0}


def draw_bench(result: dict[str, Any], path: str) -> None:
    """Throughput, speedup, acceptance per position and step times of one benchmark; below them
    steps and steady decoding of other systems, where they were given."""
    plt = pyplot()
    steady = result.get("steady_decode")
    figure, axes = plt.subplots(
        3 if steady else 2, 2, figsize=(11, 12 if steady else 8), layout="constrained"
    )
    rows = result["rows"]
    colours = _colours_of(rows)
    figure.suptitle(_title(result), fontsize=10)
    _throughput(axes[0, 0], rows, colours)
    _speedup(axes[0, 1], rows, colours)
    _acceptance(axes[1, 0], rows, colours)
    _step_times(axes[1, 1], rows)
    if steady:
        draw_steps_of_all(axes[2, 0], steady)
        draw_steady_decode(axes[2, 1], steady, colours)
    save(figure, path)
    plt.close(figure)


def _title(result: dict[str, Any]) -> str:
    note = "\nSYNTHETIC acceptance: drawn, not found" if result["synthetic"] else ""
    return f"{result['title']}{note}"


def _colours_of(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """A colour per contender, the same in every panel."""
    return dict(zip(_contenders(rows), itertools.cycle(COLOURS)))


def _contenders(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    names = dict.fromkeys(name_of(row) for row in rows)
    return {name: [row for row in rows if name_of(row) == name] for name in names}


def _throughput(axes: Any, rows: Sequence[dict[str, Any]], colours: dict[str, str]) -> None:
    for name, own in _contenders(rows).items():
        at = [row["concurrency"] for row in own]
        rates = [row["output_tokens_per_s"] for row in own]
        middle = [rate["median"] for rate in rates]
        spread = [
            [rate["median"] - rate["min"] for rate in rates],
            [rate["max"] - rate["median"] for rate in rates],
        ]
        axes.errorbar(at, middle, spread, marker="o", capsize=3, color=colours[name], label=name)
    axes.set(title="Throughput, prompts read in between", ylabel="output tokens/s")
    from_zero(axes, room=1.15)
    concurrency_axis(axes, rows)
    axes.legend(loc="upper left", fontsize=8)


def _speedup(axes: Any, rows: Sequence[dict[str, Any]], colours: dict[str, str]) -> None:
    axes.axhline(1, color=GREY, linewidth=1, linestyle="--")
    drafting = [r for r in rows if "speedup" in r and r["method"] != "none"]
    own = _contenders(drafting)
    for name, mine in own.items():
        at, middle = [r["concurrency"] for r in mine], [r["speedup"]["median"] for r in mine]
        axes.plot(at, middle, marker="o", color=colours[name], label=name)
        for x, y in zip(at, middle) if len(own) <= 2 else ():
            below = y < max(r["speedup"]["median"] for r in drafting if r["concurrency"] == x)
            axes.annotate(
                f"{y:.2f}x", (x, y), (0, -14 if below else 7),
                textcoords="offset points", ha="center", fontsize=8,
            )  # fmt: skip
    if own:
        axes.legend(loc="upper right", fontsize=8)
    axes.set(title="Speedup, prompts read in between", ylabel="times plain decoding")
    high = axes.get_ylim()[1]
    axes.set_ylim(0, max(high, 1) * 1.2)
    concurrency_axis(axes, rows)


def _acceptance(axes: Any, rows: Sequence[dict[str, Any]], colours: dict[str, str]) -> None:
    """Of every contender's rows together: concurrency does not change what is accepted."""
    own = [row for row in rows if row["speculation"]["num_spec_steps"]]
    axes.set(title="Acceptance per position", xlabel="place in the block", ylabel="share of steps")
    axes.set_ylim(0, 1.3)
    axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    if not own:
        axes.text(0.5, 0.5, "no method drafted", ha="center", transform=axes.transAxes, color=GREY)
        return
    contenders = _contenders(own)
    for i, (name, mine) in enumerate(contenders.items()):
        found = max(mine, key=lambda row: row["concurrency"])["speculation"]
        rates = found["acceptance_rate_per_position"]
        places = range(1, len(rates) + 1)
        if len(contenders) > 2:
            axes.plot(places, rates, marker=".", color=colours[name], label=name)
            continue
        width = 0.8 / len(contenders)
        shift = (i - (len(contenders) - 1) / 2) * width
        axes.bar([p + shift for p in places], rates, width, color=colours[name], label=name)
        _conditional(axes, found, name, colours[name])
    axes.set_xticks(list(places))
    axes.legend(fontsize=8, ncols=2, loc="upper left")


def _conditional(axes: Any, found: dict[str, Any], name: str, colour: str) -> None:
    rates = enumerate(found["conditional_acceptance_rate_per_position"], 1)
    reached = [(place, rate) for place, rate in rates if found["reached_per_position"][place - 1]]
    axes.plot(
        *zip(*reached),
        marker=".",
        markeredgecolor="black",
        linewidth=1,
        color=colour,
        label=f"{name}, once all before were accepted",
    )


def _step_times(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Bars by concurrency, one per method: what is accepted does not change a step's time. Drafting
    methods are stacked by part where the parts were timed."""
    axes.set(title="Decode step", xlabel="concurrent requests", ylabel="ms")
    at = sorted({row["concurrency"] for row in rows})
    methods = list(dict.fromkeys(row["method"] for row in rows))
    width = 0.8 / len(methods)
    for i, method in enumerate(methods):
        colour = COLOURS[i % len(COLOURS)]
        axes.bar(0, 0, color=colour, label=f"{'plain' if method == 'none' else method} step")
        for concurrency in at:
            same = [r for r in rows if (r["method"], r["concurrency"]) == (method, concurrency)]
            x = at.index(concurrency) + (i - (len(methods) - 1) / 2) * width
            if same:
                _step_bar(axes, x, width * 0.92, colour, same[0])
    if any(row.get("part_ms") for row in rows):
        for part, alpha in ALPHA_OF_PART.items():
            axes.bar(0, 0, color="black", alpha=alpha, label=f"{part} alone")
        axes.plot([], [], "D", color="black", markersize=5, label="whole step in the engine")
    axes.plot([], [], color="black", linewidth=1.5, linestyle=":", label="memory floor")
    axes.set_xticks(range(len(at)), [str(c) for c in at])
    from_zero(axes, room=1.4)
    axes.legend(fontsize=8, ncols=2, loc="upper left")


def _step_bar(axes: Any, x: float, width: float, colour: str, row: dict[str, Any]) -> None:
    """The step, or its parts one on the other with the step as a mark; the floor as a line."""
    bottom = 0.0
    for part, value in (row.get("part_ms") or {}).items():
        axes.bar(x, value, width, bottom, color=colour, alpha=ALPHA_OF_PART[part])
        bottom += value
    if row["step_ms"] and bottom:
        axes.plot(x, row["step_ms"]["p50"], "D", color="black", markersize=5)
    elif row["step_ms"]:
        axes.bar(x, row["step_ms"]["p50"], width, color=colour)
    floor = [row["floor_ms"]] * 2
    axes.plot([x - width / 2, x + width / 2], floor, color="black", linewidth=1.5, linestyle=":")
