"""Panels of steady decoding: our steps and rates beside other systems'."""

import itertools
from collections.abc import Sequence
from typing import Any

from jaxspec.measure.plots import COLOURS, concurrency_axis, from_zero


def draw_steps_of_all(axes: Any, steady: Sequence[dict[str, Any]]) -> None:
    """Steps of every system: plain dashed, drafting whole."""
    systems = dict.fromkeys(row["system"] for row in steady)
    for system, colour in zip(systems, itertools.cycle(COLOURS)):
        axes.plot([], [], color=colour, label=system)
        for mode in dict.fromkeys(row["mode"] for row in steady if row["system"] == system):
            own = [row for row in steady if (row["system"], row["mode"]) == (system, mode)]
            steps = {row["concurrency"]: row["step_ms"] for row in own}
            axes.plot(*zip(*steps.items()), _style_of(mode), marker=".", color=colour)
    for mode in sorted(dict.fromkeys(row["mode"] for row in steady)):
        axes.plot([], [], _style_of(mode), color="black", label=mode)
    axes.set(title="Decode step, all systems", ylabel="ms")
    from_zero(axes, room=1.1)
    concurrency_axis(axes, steady)
    axes.legend(fontsize=8, ncols=2, loc="upper left")


def _style_of(mode: str) -> str:
    return "--" if mode == "plain" else "-"


def draw_steady_decode(
    axes: Any, steady: Sequence[dict[str, Any]], colours: dict[str, str]
) -> None:
    """Ours, and as crosses the best of the others, each with the same acceptance."""
    for name in dict.fromkeys(row["name"] for row in steady):
        own = [row for row in steady if row["name"] == name]
        ours = {r["concurrency"]: r["tokens_per_s"] for r in own if r["system"] == "jaxspec"}
        axes.plot(*zip(*ours.items()), marker="o", color=colours[name], label=name)
        for concurrency in ours:
            others = [
                row["tokens_per_s"]
                for row in own
                if row["system"] != "jaxspec" and row["concurrency"] == concurrency
            ]
            if others:
                axes.plot(concurrency, max(others), "x", color=colours[name], markersize=8)
    axes.plot([], [], "x", color="black", label="best of the others")
    axes.set(title="Steady decode: concurrency x length / step", ylabel="tokens/s")
    from_zero(axes, room=1.1)
    concurrency_axis(axes, steady)
    axes.legend(fontsize=8, loc="upper left")
