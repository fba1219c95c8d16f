"""Reading a recorded trace: its kernels with their scopes, launches of programs, and steps."""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from jaxspec.console.files import read_json
from jaxspec.trace.events import Event, device_events, host_events, host_steps, read_planes
from jaxspec.trace.scopes import OpNames, match_programs, scope_of


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One launch of a kernel; on the CPU, one instruction of a program."""

    name: str
    phase: str
    """Phase of a step: prefill, draft, verify, accept, commit, admit, or `UNKNOWN`."""
    part: str
    """Part of a layer or of a model: qkv, attention, head ...; exchange, where devices wait for
    each other's numbers."""
    device: str
    line: str
    """Stream or thread."""
    start_ns: float
    end_ns: float
    self_ns: float
    """Duration without the kernels inside it."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """One run of a program, from the start of its first kernel to the end of its last one."""

    program: str
    device: str
    start_ns: float
    end_ns: float


@dataclasses.dataclass(frozen=True)
class Trace:
    """Everything in a recording."""

    kernels: tuple[Kernel, ...]
    steps: tuple[tuple[int, float, float], ...]
    """Number, start and end of every step on the host, in nanoseconds."""
    run: dict[str, Any]
    """The contents of run.json."""
    launches: tuple[Launch, ...] = ()
    """Launches of programs on an accelerator, by start; empty on the CPU."""


def read_trace(folder: str) -> Trace:
    """The trace in a folder that a `--profile-dir` run wrote."""
    place = Path(folder)
    planes = read_planes(place)
    on_device = list(device_events(planes))
    events = on_device or list(host_events(planes))
    names = match_programs(events, _read_if_there(place / "programs.json", []))
    return Trace(
        kernels=tuple(_kernels(events, names)),
        steps=tuple(sorted(host_steps(planes))),
        run=_read_if_there(place / "run.json", {}),
        launches=tuple(_launches(on_device)),
    )


def _read_if_there(file: Path, otherwise: Any) -> Any:
    return read_json(file) if file.exists() else otherwise


def _launches(events: Sequence[Event]) -> list[Launch]:
    programs = defaultdict(list)
    for event in sorted(events, key=lambda event: event.start_ns):
        if event.op:
            programs[f"{event.module}({event.program})", event.device].append(event)
    launches = itertools.chain.from_iterable(
        _launches_of(program, device, own) for (program, device), own in programs.items()
    )
    return sorted(launches, key=lambda launch: launch.start_ns)


def _launches_of(program: str, device: str, events: Sequence[Event]) -> Iterator[Launch]:
    begins = [i for i in range(len(events)) if _begins_a_launch(events, i)]
    for begin, end in pairwise([*begins, len(events)]):
        last = max(event.end_ns for event in events[begin:end])
        yield Launch(program, device, events[begin].start_ns, last)


def _begins_a_launch(events: Sequence[Event], i: int) -> bool:
    """Whether event i begins a launch: it is the program's first instruction, and not one more
    kernel in the same launch of a command buffer."""
    if events[i].op != events[0].op:
        return False
    return i == 0 or events[i].graph is None or events[i].graph != events[i - 1].graph


def _kernels(events: Sequence[Event], names: OpNames) -> Iterator[Kernel]:
    lines = defaultdict(list)
    for event in events:
        lines[event.device, event.line].append(event)
    for (device, line), own in lines.items():
        for event, self_ns in _self_times(own):
            op_name = names[event.module, event.program].get(event.op, "")
            scope = scope_of(op_name, event.module)
            times = event.start_ns, event.end_ns, self_ns
            yield Kernel(event.name, *scope, device, line, *times)


def _self_times(events: list[Event]) -> list[tuple[Event, float]]:
    """The duration of every event of one line, without the durations of events inside it."""
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
