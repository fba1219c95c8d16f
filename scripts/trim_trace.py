"""Makes a recorded trace small: keeps kernels, step marks, and the scopes of their instructions.

    python scripts/trim_trace.py trace small-trace

`python -m jaxspec.profile` reads a small trace like a whole one. What is left out is mostly copies
of the programs, which are for viewers.
"""

import argparse
import json
import shutil
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jax.profiler import ProfileData

from jaxspec import cli
from jaxspec.console.files import read_json
from jaxspec.trace.events import read_planes

KEPT = ("hlo_op", "hlo_module", "program_id", "step_num", "correlation_id", "cuda_graph_id")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore", DeprecationWarning)  # a type in jaxlib that names no module
    lines = kept_lines(read_planes(options.folder))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "trimmed.xplane.pb").write_bytes(written(lines))
    ops = {op for *_, events in lines for *_, stats in events if (op := stats.get("hlo_op"))}
    programs = read_json(options.folder / "programs.json")
    for program in programs:
        names = program["op_names"].items()
        program["op_names"] = {op: name for op, name in names if op in ops}
    (options.out / "programs.json").write_text(json.dumps(programs, indent=0) + "\n")
    shutil.copy(options.folder / "run.json", options.out / "run.json")


def kept_lines(planes: Iterable[Any]) -> list[tuple[str, str, list[tuple]]]:
    """The lines to keep, as (plane, line, events). An event is a name, a start, a length in
    nanoseconds, and stats."""
    lines = ((plane, line, kept_events(plane, line)) for plane in planes for line in plane.lines)
    return [
        (plane.name, line.name, events)
        for plane, line, events in lines
        if is_stream(plane, line) or events
    ]


def kept_events(plane: Any, line: Any) -> list[tuple[str, float, float, dict[str, Any]]]:
    """All events of a stream; of a host thread only the step marks."""
    if is_stream(plane, line):
        return [event_of(event) for event in line.events]
    if plane.name != "/host:CPU":
        return []
    return [event_of(event) for event in line.events if event.name == "step"]


def is_stream(plane: Any, line: Any) -> bool:
    return plane.name.startswith("/device:") and line.name.startswith("Stream")


def event_of(event: Any) -> tuple[str, float, float, dict[str, Any]]:
    stats = {key: value for key, value in event.stats if key in KEPT}
    return event.name, event.start_ns, event.duration_ns, stats


def written(lines: Iterable[tuple[str, str, list[tuple]]]) -> bytes:
    """The lines as a serialised trace."""
    planes: dict[str, list[str]] = {}
    names, stats = {}, {}
    number = lambda table, key: table.setdefault(key, len(table) + 1)
    for plane, line, events in lines:
        body = planes.setdefault(plane, [])
        body.append(f"lines {{ id: {len(body) + 1} name: {json.dumps(line)}")
        for name, start, length, event_stats in events:
            body.append(
                f"events {{ metadata_id: {number(names, name)} offset_ps: {round(start * 1e3)} "
                f"duration_ps: {round(length * 1e3)}"
            )
            for key, value in event_stats.items():
                kind = "int64_value" if isinstance(value, int) else "str_value"
                body.append(
                    f"stats {{ metadata_id: {number(stats, key)} {kind}: {json.dumps(value)} }}"
                )
            body.append("}")
        body.append("}")
    tables = [
        f"{kind}_metadata {{ key: {id} value {{ id: {id} name: {json.dumps(name)} }} }}"
        for kind, table in (("event", names), ("stat", stats))
        for name, id in table.items()
    ]
    text = [
        f"planes {{ name: {json.dumps(p)} {' '.join([*b, *tables])} }}" for p, b in planes.items()
    ]
    return ProfileData.text_proto_to_serialized_xspace("\n".join(text))


if __name__ == "__main__":
    sys.exit(cli.run(main))
