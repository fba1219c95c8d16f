"""The times in a trace: sums by scope and by kernel, and the gaps between kernels."""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from jaxspec.trace.reading import Kernel, Trace, busy
from jaxspec.trace.scopes import PHASES

COUNTED_GAP_NS = 1000.0
"""Shortest gap that counts, in nanoseconds. A shorter gap is only the launch of the next kernel."""


def summarise(trace: Trace) -> dict[str, Any]:
    """The sums and tables of a trace. Milliseconds are of the whole recording, unless their name
    says per step. If there are several devices, the figures per step and the times busy and idle
    are means over the devices."""
    devices = sorted({kernel.device for kernel in trace.kernels})
    intervals = [busy(_of_device(trace, device)) for device in devices]
    steps = max(len(trace.steps), 1) * max(len(devices), 1)
    total = sum(kernel.self_ns for kernel in trace.kernels)
    gaps = [b[0] - a[1] for own in intervals for a, b in pairwise(own)]
    begins, ends = ([own[end][end] for own in intervals] for end in (0, -1))
    wall = max(ends, default=0.0) - min(begins, default=0.0)
    busy_ns = sum(map(_length, intervals)) / max(len(devices), 1)
    return {
        "steps": len(trace.steps),
        "kernels": len(trace.kernels),
        "kernel_ms": total / 1e6,
        "kernel_ms_per_step": total / 1e6 / steps,
        "wall_ms": wall / 1e6,
        "busy_ms": busy_ns / 1e6,
        "idle_ms": (wall - busy_ns) / 1e6,
        "device_ms_per_step": _device_ms(trace, steps),
        "gaps_over_1us": sum(gap > COUNTED_GAP_NS for gap in gaps),
        "longest_gap_us": max(gaps, default=0.0) / 1e3,
        "step_wall_ms": [(end - start) / 1e6 for _, start, end in trace.steps],
        "devices": [_device(trace, device, wall) for device in devices],
        "scopes": list(_scopes(trace, total, steps)),
        "by_kernel": _by_kernel(trace.kernels, total),
    }


def _of_device(trace: Trace, device: str) -> list[Kernel]:
    return [kernel for kernel in trace.kernels if kernel.device == device]


def _length(intervals: Sequence[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)


def _device(trace: Trace, device: str, wall: float) -> dict[str, Any]:
    """How one of several devices spent the recording. An exchange takes until the last device has
    sent its part, so the device that is ahead has the longest exchanges."""
    kernels, steps = _of_device(trace, device), max(len(trace.steps), 1)
    exchanges = [kernel.self_ns for kernel in kernels if kernel.part == "exchange"]
    busy_ns = _length(busy(kernels))
    return {
        "device": device,
        "kernel_ms_per_step": sum(kernel.self_ns for kernel in kernels) / 1e6 / steps,
        "exchange_ms_per_step": sum(exchanges) / 1e6 / steps,
        "exchanges_per_step": len(exchanges) / steps,
        "busy_ms": busy_ns / 1e6,
        "idle_ms": (wall - busy_ns) / 1e6,
    }


def _device_ms(trace: Trace, steps: int) -> float | None:
    """Milliseconds per step from the first kernel of each program to its last; None on the CPU.
    Medians are used, because nothing runs before the first step, which makes it differ."""
    programs = defaultdict(list)
    for launch in trace.launches:
        programs[launch.program, launch.device].append(launch.end_ns - launch.start_ns)
    spent = (statistics.median(times) * len(times) / steps for times in programs.values())
    return sum(spent) / 1e6 if programs else None


def _scopes(trace: Trace, total: float, steps: int) -> Iterator[dict[str, Any]]:
    """Phases in the order of a step, each with its parts in decreasing order of time."""
    phases = defaultdict(lambda: defaultdict(list))
    for kernel in trace.kernels:
        phases[kernel.phase][kernel.part].append(kernel.self_ns)
    order = sorted(phases, key=lambda name: PHASES.index(name) if name in PHASES else len(PHASES))
    for phase in order:
        spent = sum(sum(times) for times in phases[phase].values())
        yield _scope(phase, "", spent, total, steps, sum(map(len, phases[phase].values()))) | (
            _floor(trace, phase, spent, steps)
        )
        for part, times in sorted(phases[phase].items(), key=lambda item: -sum(item[1])):
            yield _scope(phase, part, sum(times), total, steps, len(times))


def _scope(
    phase: str, part: str, spent: float, total: float, steps: int, count: int
) -> dict[str, Any]:
    return {
        "phase": phase,
        "part": part,
        "ms_per_step": spent / 1e6 / steps,
        "share": spent / total if total else 0.0,
        "kernels_per_step": count / steps,
    }


def _floor(trace: Trace, phase: str, spent: float, steps: int) -> dict[str, Any]:
    """The bytes of weights that a phase reads in every step, and the least time in which they can
    be read, as a share of the phase's time."""
    weights = trace.run.get("bytes", {}).get(phase)
    if not weights or not spent:
        return {}
    floor_ns = 1e9 * weights / trace.run["copy_bytes_per_second"]
    return {"weight_bytes": weights, "floor_fraction": floor_ns * steps / spent}


def _by_kernel(kernels: Sequence[Kernel], total: float) -> list[dict[str, Any]]:
    groups = defaultdict(list)
    for kernel in kernels:
        groups[kernel.phase, kernel.part, kernel.name].append(kernel.self_ns)
    ordered = sorted(groups.items(), key=lambda item: -sum(item[1]))
    return [
        {
            "phase": phase,
            "part": part,
            "name": name,
            "calls": len(times),
            "ms": sum(times) / 1e6,
            "us_per_call": sum(times) / len(times) / 1e3,
            "share": sum(times) / total if total else 0.0,
        }
        for (phase, part, name), times in ordered
    ]


def report(summary: dict[str, Any], run: dict[str, Any], top: int) -> list[str]:
    """The summary as text: totals, a line per scope, and the `top` kernels with most time."""
    return [
        *_totals(summary, run),
        *_by_device(summary["devices"]),
        "",
        f"{'scope':<28}{'ms/step':>10}{'share':>8}{'launches/step':>15}{'weights / floor':>22}",
        *map(_scope_line, summary["scopes"]),
        "",
        f"{'kernel':<46}{'scope':<24}{'calls':>7}{'us/call':>10}{'share':>8}",
        *map(_kernel_line, summary["by_kernel"][:top]),
    ]


def _totals(summary: dict[str, Any], run: dict[str, Any]) -> Iterator[str]:
    device = run.get("environment", {}).get("device", "unknown device")
    yield (
        f"{summary['steps']} steps on {device}, {run.get('method', '?')}, "
        f"{run.get('driver', '?')} driver, {how_recorded(run)}"
    )
    per_step = summary["kernel_ms_per_step"]
    yield f"kernels {summary['kernel_ms']:.3f} ms, {per_step:.3f} ms per step"
    yield from _shares_of_device_time(summary)
    if _lacks_scopes(summary, run.get("mode", "unknown"), device):
        yield "kernels inside command buffers have no scope; record with --profile-readable too"
    yield (
        f"device busy {summary['busy_ms']:.3f} of {summary['wall_ms']:.3f} ms; idle "
        f"{summary['idle_ms']:.3f} ms, {summary['gaps_over_1us']} gaps over 1 us, the longest "
        f"{summary['longest_gap_us']:.1f} us"
    )


def _by_device(devices: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each of several devices."""
    if len(devices) < 2:
        return []
    columns = "kernel_ms_per_step exchange_ms_per_step exchanges_per_step busy_ms idle_ms".split()
    names = ("ms/step", "exchange ms/step", "exchanges/step", "busy ms", "idle ms")
    lines = [
        f"{one['device']:<28}" + "".join(f"{one[c]:>18.3f}" for c in columns) for one in devices
    ]
    return ["", f"{'device':<28}" + "".join(f"{name:>18}" for name in names), *lines]


def _scope_line(scope: dict[str, Any]) -> str:
    name = f"  {scope['part']}" if scope["part"] else scope["phase"]
    floor = ""
    if "floor_fraction" in scope:
        floor = f"{scope['weight_bytes'] / 1e6:.1f} MB / {100 * scope['floor_fraction']:.0f}%"
    return (
        f"{name:<28}{scope['ms_per_step']:>10.4f}{100 * scope['share']:>7.1f}%"
        f"{scope['kernels_per_step']:>15.1f}{floor:>22}"
    )


def _kernel_line(kernel: dict[str, Any]) -> str:
    scope = f"{kernel['phase']}/{kernel['part']}"
    return (
        f"{_short(kernel['name'], 45):<46}{_short(scope, 23):<24}{kernel['calls']:>7}"
        f"{kernel['us_per_call']:>10.2f}{100 * kernel['share']:>7.1f}%"
    )


def how_recorded(run: dict[str, Any]) -> str:
    synthetic = ", SYNTHETIC acceptance" if run.get("synthetic") else ""
    return f"{run.get('mode', 'unknown')} mode{synthetic}"


def _lacks_scopes(summary: dict[str, Any], mode: str, device: str) -> bool:
    """Whether most of the time has no scope, as on a GPU with command buffers."""
    scopes = [s for s in summary["scopes"] if s["part"] and s["phase"] in PHASES]
    return mode == "timing" and device != "cpu" and sum(s["share"] for s in scopes) <= 0.5


def _shares_of_device_time(summary: dict[str, Any]) -> Iterator[str]:
    for key, description in (
        ("device_ms_per_step", "a step, first kernel to last"),
        ("timing_ms_per_step", "a step with command buffers"),
    ):
        if device_ms := summary.get(key):
            share = summary["kernel_ms_per_step"] / device_ms
            yield f"  {100 * share:.1f}% of the {device_ms:.3f} ms of {description}"


def _short(name: str, width: int) -> str:
    return name if len(name) <= width else f"{name[: width - 3]}..."
