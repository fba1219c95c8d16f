"""A recorded trace as kernels with the scope that each came from, read without a viewer."""

import dataclasses
import json
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from jaxspec.errors import LoadError

PHASES = ("prefill", "draft", "verify", "accept", "commit")
PARTS = (
    "qkv",
    "qkv_write",
    "attention_out",
    "gate_up",
    "down",
    "embedding",
    "feature_projection",
)
PHASE_OF_MODULE = {
    "jit_prefill_step": "prefill",
    "jit_draft_step": "draft",
    "jit_verify_step": "verify",
    "jit_commit_step": "commit",
    "jit_seat_step": "seat",
}
UNKNOWN = "(no scope)"


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


@dataclasses.dataclass(frozen=True)
class _Event:
    name: str
    line: str
    start_ns: float
    duration_ns: float
    op: str
    module: str
    program: int | None
    graph: int | None
    """Which launch of a command buffer it was in; None for a kernel launched by itself."""


def read_trace(folder: str) -> Trace:
    """The trace in a folder that a `--profile-dir` run wrote."""
    place = Path(folder)
    files = sorted(place.glob("**/*.xplane.pb"))
    if not files:
        raise LoadError(f"no trace in {folder}; record one with --profile-dir {folder}")
    planes = _planes(files[-1])
    on_device = list(_device_events(planes))
    events = on_device or list(_host_events(planes))
    names = _op_names(events, _read_json(place / "programs.json", []))
    return Trace(
        kernels=tuple(_kernels(events, names)),
        steps=tuple(sorted(_steps(planes))),
        run=_read_json(place / "run.json", {}),
        launches=tuple(_launches(on_device)),
    )


def _planes(file: Path) -> list[Any]:
    from jax.profiler import ProfileData

    try:
        return list(ProfileData.from_file(str(file)).planes)
    except (RuntimeError, ValueError, OSError) as error:
        raise LoadError(f"{file} is not a trace: {error}") from error


def _read_json(file: Path, otherwise: Any) -> Any:
    if not file.exists():
        return otherwise
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise LoadError(f"{file} is not JSON: {error}") from error


def _device_events(planes: Sequence[Any]) -> Iterator[_Event]:
    """What ran on accelerators: their streams; other lines there repeat it in other words."""
    for plane in planes:
        if plane.name.startswith("/device:"):
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    yield from (_event(event, line.name) for event in line.events)


def _host_events(planes: Sequence[Any]) -> Iterator[_Event]:
    """On the CPU: the instructions among what its threads did."""
    for plane in planes:
        if plane.name == "/host:CPU":
            for line in plane.lines:
                found = (_event(event, line.name) for event in line.events)
                yield from (event for event in found if event.op)


def _event(event: Any, line: str) -> _Event:
    stats = _stats(event)
    return _Event(
        name=event.name,
        line=line,
        start_ns=event.start_ns,
        duration_ns=event.duration_ns,
        op=str(stats.get("hlo_op", "")),
        module=str(stats.get("hlo_module", "")),
        program=stats.get("program_id"),
        graph=stats.get("correlation_id") if "cuda_graph_id" in stats else None,
    )


def _launches(events: Sequence[_Event]) -> Iterator[Launch]:
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
            last = max(map(_end, own[begin:end]))
            launches.append(Launch(f"{module}({program})", own[begin].start_ns, last))
    yield from sorted(launches, key=lambda launch: launch.start_ns)


def _is_new(event: _Event, before: Sequence[_Event]) -> bool:
    return not before or before[-1].graph != event.graph


def _stats(event: Any) -> dict[str, Any]:
    with warnings.catch_warnings():  # a type in jaxlib that names no module
        warnings.simplefilter("ignore", DeprecationWarning)
        return dict(event.stats)


def _steps(planes: Sequence[Any]) -> Iterator[tuple[int, float, float]]:
    for plane in planes:
        if plane.name == "/host:CPU":
            for event in (event for line in plane.lines for event in line.events):
                if event.name == "step" and "step_num" in (stats := _stats(event)):
                    yield stats["step_num"], event.start_ns, event.start_ns + event.duration_ns


def _op_names(
    events: Iterable[_Event], programs: Sequence[dict[str, Any]]
) -> dict[tuple[str, int | None], dict[str, str]]:
    """Per program in the trace the op_names of the recorded program that fits it best: two
    programs of one step, for different numbers of rows, bear the same name."""
    seen = defaultdict(set)
    for event in events:
        seen[event.module, event.program].add(event.op)
    chosen = {}
    for (module, program), ops in seen.items():
        same = [p["op_names"] for p in programs if p["module"] == module]
        chosen[module, program] = max(same, key=lambda names: len(ops & set(names)), default={})
    return chosen


def _kernels(
    events: Sequence[_Event], names: dict[tuple[str, int | None], dict[str, str]]
) -> Iterator[Kernel]:
    lines = defaultdict(list)
    for event in events:
        lines[event.line].append(event)
    for line, own in lines.items():
        for event, self_ns in _self_times(own):
            op_name = names[event.module, event.program].get(event.op, "")
            phase, part = scope_of(op_name, event.module)
            end = event.start_ns + event.duration_ns
            yield Kernel(event.name, phase, part, line, event.start_ns, end, self_ns)


def _self_times(events: list[_Event]) -> list[tuple[_Event, float]]:
    """Durations less those of events inside them, on one line."""
    inside: dict[int, float] = defaultdict(float)
    order = sorted(events, key=lambda event: (event.start_ns, -event.duration_ns))
    open_events: list[int] = []
    for i, event in enumerate(order):
        while open_events and _end(order[open_events[-1]]) <= event.start_ns:
            open_events.pop()
        if open_events and _end(event) <= _end(order[open_events[-1]]):
            inside[open_events[-1]] += event.duration_ns
        open_events.append(i)
    return [(event, max(event.duration_ns - inside[i], 0.0)) for i, event in enumerate(order)]


def _end(event: _Event) -> float:
    return event.start_ns + event.duration_ns


def scope_of(op_name: str, module: str) -> tuple[str, str]:
    """Phase and part of `jit(spec_step)/verify/Qwen3/layer_0/layers_0/mlp/down/dot_general`."""
    path = op_name.split(";")[0].split("/")
    phase = path[1] if len(path) > 1 and path[1] in PHASES else None
    phase = phase or PHASE_OF_MODULE.get(module, UNKNOWN)
    for outer in ("context", "head"):
        if outer in path:
            return phase, outer
    for name in reversed(path):
        name = name.split(".")[0]
        if name in PARTS:
            return phase, name
    if "attention" in path:
        return phase, "attention"
    return phase, "final norm" if "norm" in path else "other"


def busy(kernels: Iterable[Kernel]) -> list[tuple[float, float]]:
    """Intervals in which anything ran, merged: overlaps count once."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted((kernel.start_ns, kernel.end_ns) for kernel in kernels):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged
