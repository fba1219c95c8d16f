"""The picture of a trace: its middle step on a time line, and the time of every scope."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from jaxspec.measure.drawing import COLOURS, GREY, pyplot, save
from jaxspec.trace.reading import Kernel, Trace
from jaxspec.trace.scopes import PHASES
from jaxspec.trace.tables import how_recorded

COLOUR_OF: dict[str, str] = dict(
    zip(PHASES, (COLOURS[3], COLOURS[1], COLOURS[0], COLOURS[2], "#c9a227"))
)


def draw_profile(trace: Trace, summary: dict[str, Any], path: str) -> None:
    plt = pyplot()
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(11, 8), height_ratios=(1, 2.4), layout="constrained"
    )
    device = trace.run.get("environment", {}).get("device", "unknown device")
    figure.suptitle(
        f"{trace.run.get('method', '?')} on {device}: {summary['steps']} steps recorded, "
        f"{summary['kernel_ms_per_step']:.3f} ms of kernels per step "
        f"({how_recorded(trace.run)})",
        fontsize=10,
    )
    _time_line(above, _kernels_of_middle_step(trace))
    _scopes(below, summary)
    save(figure, path)
    plt.close(figure)


def _time_line(axes: Any, kernels: Sequence[Kernel]) -> None:
    """A bar per stream or thread, coloured by phase."""
    begin = min(kernel.start_ns for kernel in kernels)
    lines = list(dict.fromkeys(kernel.line for kernel in kernels))
    intervals = defaultdict(list)
    for kernel in kernels:
        interval = (kernel.start_ns - begin) / 1e6, (kernel.end_ns - kernel.start_ns) / 1e6
        intervals[kernel.phase, lines.index(kernel.line)].append(interval)
    for phase, line in sorted(intervals, key=lambda key: _order_of(key[0])):
        colour = COLOUR_OF.get(phase, GREY)
        axes.broken_barh(intervals[phase, line], (line - 0.38, 0.76), color=colour)
    for phase in sorted({phase for phase, _ in intervals}, key=_order_of):
        axes.plot([], [], color=COLOUR_OF.get(phase, GREY), linewidth=6, label=phase)
    axes.set(title="One step", xlabel="ms", ylim=(-0.6, len(lines) - 0.4))
    names = lines if len(lines) == 1 else [f"{i}" for i in range(len(lines))]
    axes.set_yticks(range(len(lines)), names)
    axes.set_ylabel("stream" if "Stream" in lines[0] else "thread")
    axes.legend(ncols=6, loc="lower left", bbox_to_anchor=(0.12, 1.0), fontsize=8)


def _order_of(phase: str) -> int:
    return PHASES.index(phase) if phase in PHASES else len(PHASES)


def _kernels_of_middle_step(trace: Trace) -> list[Kernel]:
    """The kernels of the step in the middle of the trace; all kernels if no step can be found. On
    the CPU, the host's marks say where the step begins and ends."""
    if trace.launches:
        longest = max(trace.launches, key=lambda launch: launch.end_ns - launch.start_ns).program
        steps = [launch for launch in trace.launches if launch.program == longest]
        start, end = steps[len(steps) // 2].start_ns, steps[len(steps) // 2].end_ns
    elif trace.steps:
        _, start, end = trace.steps[len(trace.steps) // 2]
    else:
        return list(trace.kernels)
    inside = [kernel for kernel in trace.kernels if start <= kernel.start_ns < end]
    return inside or list(trace.kernels)


def _scopes(axes: Any, summary: dict[str, Any]) -> None:
    parts = [scope for scope in summary["scopes"] if scope["part"] and scope["share"] >= 0.002]
    for row, scope in enumerate(parts):
        axes.barh(row, scope["ms_per_step"], color=COLOUR_OF.get(scope["phase"], GREY))
        axes.annotate(
            f"{scope['ms_per_step']:.3f} ms, {100 * scope['share']:.1f}%",
            (scope["ms_per_step"], row),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.set_yticks(range(len(parts)), [f"{s['phase']} / {s['part']}" for s in parts], fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, 1.18 * max(scope["ms_per_step"] for scope in parts))
    axes.set(title="Kernels by scope (shares below 0.2 % left out)", xlabel="ms per step")
