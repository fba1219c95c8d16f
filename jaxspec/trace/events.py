"""Reads the profiler's recording (xplane files) as events, without a viewer."""

import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxspec.errors import LoadError


@dataclasses.dataclass(frozen=True)
class Event:
    """One launch of a kernel; on the CPU, one instruction of a program."""

    name: str
    device: str
    """Name of the device; on the CPU with its number, if jax shows the CPU as several devices."""
    line: str
    """Stream or thread."""
    start_ns: float
    duration_ns: float
    op: str
    """The program's instruction; empty if the event does not belong to one."""
    module: str
    program: int | None
    graph: int | None
    """Number of the launch of a command buffer that contained the event; None for a kernel that was
    launched by itself."""

    @property
    def end_ns(self) -> float:
        return self.start_ns + self.duration_ns


def read_planes(folder: Path) -> list[Any]:
    """The planes of the newest recording in a folder that a `--profile-dir` run wrote."""
    files = sorted(folder.glob("**/*.xplane.pb"))
    if not files:
        which = "" if folder.is_dir() else ", which is no folder"
        raise LoadError(
            f"no trace in {folder}{which}; expected a folder that generate or bench wrote with "
            "--profile-dir: run one of them with --profile-dir and a new folder first"
        )
    from jax.profiler import ProfileData

    try:
        return list(ProfileData.from_file(str(files[-1])).planes)
    except (RuntimeError, ValueError, OSError) as error:
        raise LoadError(f"{files[-1]} is not a trace: {error}") from error


def device_events(planes: Sequence[Any]) -> Iterator[Event]:
    """Events on accelerators, taken from their streams; other lines only repeat these events."""
    for plane in planes:
        if plane.name.startswith("/device:"):
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    yield from (_event(event, line.name, plane.name) for event in line.events)


def host_events(planes: Sequence[Any]) -> Iterator[Event]:
    """Events on the CPU that are instructions of compiled programs."""
    for line in _host_lines(planes):
        events = (_event(event, line.name) for event in line.events)
        yield from (event for event in events if event.op)


def host_steps(planes: Sequence[Any]) -> Iterator[tuple[int, float, float]]:
    """Number, start and end in nanoseconds of the steps that the engine marked."""
    for event in (event for line in _host_lines(planes) for event in line.events):
        if event.name == "step" and "step_num" in (stats := _stats(event)):
            yield stats["step_num"], event.start_ns, event.start_ns + event.duration_ns


def _host_lines(planes: Sequence[Any]) -> Iterator[Any]:
    for plane in planes:
        if plane.name == "/host:CPU":
            yield from plane.lines


def _event(event: Any, line: str, device: str | None = None) -> Event:
    stats = _stats(event)
    return Event(
        name=event.name,
        device=device or f"cpu {stats.get('device_ordinal', 0)}",
        line=line,
        start_ns=event.start_ns,
        duration_ns=event.duration_ns,
        op=str(stats.get("hlo_op", "")),
        module=str(stats.get("hlo_module", "")),
        program=stats.get("program_id"),
        graph=stats.get("correlation_id") if "cuda_graph_id" in stats else None,
    )


def _stats(event: Any) -> dict[str, Any]:
    with warnings.catch_warnings():  # it warns of a type in jaxlib that has no module
        warnings.simplefilter("ignore", DeprecationWarning)
        return dict(event.stats)
