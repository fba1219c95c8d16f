"""Pictures of a benchmark and of a profile. Needs the extra `plot`."""

from collections.abc import Sequence
from typing import Any

from jaxspec.errors import LoadError

COLOURS = ("#3b6fb6", "#d1682c", "#3f8f5b", "#8a5fb0", "#7a7a7a")
GREY = "#9a9a9a"
ALPHA_OF_PART = {"draft": 0.35, "verify": 0.7, "accept": 1.0}


def pyplot() -> Any:
    """matplotlib, drawing to files; what is missing is named."""
    try:
        import matplotlib
    except ImportError as error:
        raise LoadError(
            "plots need matplotlib; install it with pip install 'jaxspec-decode[plot]'"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update(
        {
            "figure.dpi": 120,
            "font.size": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.color": "#e4e4e4",
            "axes.axisbelow": True,
            "legend.frameon": False,
            "axes.titlesize": 11,
            "axes.titlelocation": "left",
        }
    )
    return pyplot


def save(figure: Any, path: str) -> None:
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise LoadError(f"plot {path} cannot be written: {error}") from error


def draw_bench(result: dict[str, Any], path: str) -> None:
    """Throughput, speedup, acceptance per position and step times of one benchmark."""
    plt = pyplot()
    figure, axes = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
    rows = result["rows"]
    figure.suptitle(_title(result), fontsize=10)
    _throughput(axes[0, 0], rows)
    _speedup(axes[0, 1], rows)
    _acceptance(axes[1, 0], rows)
    _step_times(axes[1, 1], rows)
    save(figure, path)
    plt.close(figure)


def _title(result: dict[str, Any]) -> str:
    note = "\nSYNTHETIC acceptance: drawn, not found" if result["synthetic"] else ""
    return f"{result['title']}{note}"


def _methods(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    names = dict.fromkeys(row["method"] for row in rows)
    return {name: [row for row in rows if row["method"] == name] for name in names}


def _label(method: str) -> str:
    return "plain" if method == "none" else method


def _throughput(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    for colour, (method, own) in zip(COLOURS, _methods(rows).items()):
        at = [row["concurrency"] for row in own]
        rates = [row["output_tokens_per_s"] for row in own]
        middle = [rate["median"] for rate in rates]
        spread = [
            [rate["median"] - rate["min"] for rate in rates],
            [rate["max"] - rate["median"] for rate in rates],
        ]
        axes.errorbar(at, middle, spread, marker="o", capsize=3, color=colour, label=_label(method))
    axes.set(title="Throughput", xlabel="concurrent requests", ylabel="output tokens/s")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.15)
    _concurrency_axis(axes, rows)
    axes.legend(loc="upper left", ncols=4)


def _speedup(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    axes.axhline(1, color=GREY, linewidth=1, linestyle="--")
    for colour, (method, own) in zip(COLOURS, _methods(rows).items()):
        own = [row for row in own if "speedup" in row and method != "none"]
        if own:
            at, middle = [r["concurrency"] for r in own], [r["speedup"]["median"] for r in own]
            axes.plot(at, middle, marker="o", color=colour, label=_label(method))
            for x, y in zip(at, middle):
                below = y < max(r["speedup"]["median"] for r in rows if r["concurrency"] == x)
                shift = (0, -14 if below else 7)
                axes.annotate(
                    f"{y:.2f}x", (x, y), shift, textcoords="offset points", ha="center", fontsize=8
                )
            axes.legend(loc="upper right", ncols=4)
    axes.set(title="Speedup", xlabel="concurrent requests", ylabel="times plain decoding")
    high = axes.get_ylim()[1]
    axes.set_ylim(0, max(high, 1) * 1.2)
    _concurrency_axis(axes, rows)


def _concurrency_axis(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    ticks = sorted({row["concurrency"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(ticks[0] / 1.3, ticks[-1] * 1.3)


def _acceptance(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Of every method's rows together: concurrency does not change what is accepted."""
    own = [row for row in rows if row["speculation"]["num_spec_steps"]]
    axes.set(title="Acceptance per position", xlabel="place in the block", ylabel="share of steps")
    axes.set_ylim(0, 1.3)
    axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    if not own:
        axes.text(0.5, 0.5, "no method drafted", ha="center", transform=axes.transAxes, color=GREY)
        return
    methods = list(_methods(own).items())
    for i, (method, mine) in enumerate(methods):
        speculation = max(mine, key=lambda row: row["concurrency"])["speculation"]
        colour = COLOURS[1 + i]
        rates = speculation["acceptance_rate_per_position"]
        places = range(1, len(rates) + 1)
        shift, width = (i - (len(methods) - 1) / 2) * 0.8 / len(methods), 0.8 / len(methods)
        axes.bar([p + shift for p in places], rates, width, color=colour, label=_label(method))
        reached = [
            (place, rate)
            for place, rate, n in zip(
                places,
                speculation["conditional_acceptance_rate_per_position"],
                speculation["reached_per_position"],
            )
            if n
        ]
        axes.plot(
            *zip(*reached),
            marker=".",
            markeredgecolor="black",
            linewidth=1,
            color=colour,
            label=f"{_label(method)}, once all before were accepted",
        )
    axes.set_xticks(list(places))
    axes.legend(fontsize=8, ncols=2, loc="upper left")


def _step_times(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Bars by concurrency; drafting methods stacked by part where the parts were timed."""
    axes.set(title="Decode step", xlabel="concurrent requests", ylabel="ms")
    at = sorted({row["concurrency"] for row in rows})
    methods = list(_methods(rows).items())
    width = 0.8 / len(methods)
    for i, (method, own) in enumerate(methods):
        colour = COLOURS[i % len(COLOURS)]
        axes.bar(0, 0, color=colour, label=f"{_label(method)} step")
        for row in own:
            x = at.index(row["concurrency"]) + (i - (len(methods) - 1) / 2) * width
            _step_bar(axes, x, width * 0.92, colour, row)
    if any(row.get("part_ms") for row in rows):
        for part, alpha in ALPHA_OF_PART.items():
            axes.bar(0, 0, color="black", alpha=alpha, label=f"{part} alone")
        axes.plot([], [], "D", color="black", markersize=5, label="whole step in the engine")
    axes.plot([], [], color="black", linewidth=1.5, linestyle=":", label="memory floor")
    axes.set_xticks(range(len(at)), [str(c) for c in at])
    axes.set_ylim(0, axes.get_ylim()[1] * 1.4)
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
