"""A recorded trace as kernels with the scope that each came from, programs and steps."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from jaxspec.console.files import read_json
from jaxspec.trace.events import Event, device_events, host_events, host_steps, read_planes
from jaxspec.trace.scopes import OpNames, op_names_of, scope_of


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One launch, or one instruction where the device is the CPU."""

    name: str
    phase: str
    """prefill, draft, verify, accept, commit, seat, or that it is not known."""
    part: str
    """Of a layer or of a model: qkv, attention, head ..."""
    line: str
    """Stream or thread."""
    start_ns: float
    end_ns: float
    self_ns: float
    """Its time without that of launches inside it."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """One run of a program: from its first kernel's start to its last one's end."""

    program: str
    start_ns: float
    end_ns: float


@dataclasses.dataclass(frozen=True)
class Trace:
    """Everything that a recording holds."""

    kernels: tuple[Kernel, ...]
    steps: tuple[tuple[int, float, float], ...]
    """Number, start and end of every step on the host, in nanoseconds."""
    run: dict[str, Any]
    """run.json."""
    launches: tuple[Launch, ...] = ()
    """Of programs on an accelerator, in their order; empty on the CPU."""


def read_trace(folder: str) -> Trace:
    """The trace in a folder that a `--profile-dir` run wrote."""
    place = Path(folder)
    planes = read_planes(place)
    on_device = list(device_events(planes))
    events = on_device or list(host_events(planes))
    names = op_names_of(events, _read_if_there(place / "programs.json", []))
    return Trace(
        kernels=tuple(_kernels(events, names)),
        steps=tuple(sorted(host_steps(planes))),
        run=_read_if_there(place / "run.json", {}),
        launches=tuple(_launches(on_device)),
    )


def _read_if_there(file: Path, otherwise: Any) -> Any:
    return read_json(file) if file.exists() else otherwise


def _launches(events: Sequence[Event]) -> Iterator[Launch]:
    """A program begins anew where its first instruction comes again, or the command buffer that
    it is."""
    programs = defaultdict(list)
    for event in sorted(events, key=lambda event: event.start_ns):
        if event.op:
            programs[event.module, event.program].append(event)
    launches = []
    for (module, program), own in programs.items():
        first = own[0]
        begins = [
            i
            for i, event in enumerate(own)
            if event.op == first.op and (event.graph is None or _is_new(event, own[i - 1 : i]))
        ]
        for begin, end in pairwise([*begins, len(own)]):
            last = max(event.end_ns for event in own[begin:end])
            launches.append(Launch(f"{module}({program})", own[begin].start_ns, last))
    yield from sorted(launches, key=lambda launch: launch.start_ns)


def _is_new(event: Event, before: Sequence[Event]) -> bool:
    return not before or before[-1].graph != event.graph


def _kernels(events: Sequence[Event], names: OpNames) -> Iterator[Kernel]:
    lines = defaultdict(list)
    for event in events:
        lines[event.line].append(event)
    for line, own in lines.items():
        for event, self_ns in _self_times(own):
            op_name = names[event.module, event.program].get(event.op, "")
            scope = scope_of(op_name, event.module)
            yield Kernel(event.name, *scope, line, event.start_ns, event.end_ns, self_ns)


def _self_times(events: list[Event]) -> list[tuple[Event, float]]:
    """Durations less those of events inside them, on one line."""
    inside: dict[int, float] = defaultdict(float)
    order = sorted(events, key=lambda event: (event.start_ns, -event.duration_ns))
    open_events: list[int] = []
    for i, event in enumerate(order):
        while open_events and order[open_events[-1]].end_ns <= event.start_ns:
            open_events.pop()
        if open_events and event.end_ns <= order[open_events[-1]].end_ns:
            inside[open_events[-1]] += event.duration_ns
        open_events.append(i)
    return [(event, max(event.duration_ns - inside[i], 0.0)) for i, event in enumerate(order)]


def busy(kernels: Iterable[Kernel]) -> list[tuple[float, float]]:
    """Intervals in which anything ran, merged: overlaps count once."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted((kernel.start_ns, kernel.end_ns) for kernel in kernels):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged
