"""Other systems' step times, from a file, beside ours on equal terms: steady decode."""

import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxspec.errors import LoadError, UsageError
from jaxspec.measure.results import aligned, name_of


def read_peers(path: str, model: str) -> list[dict[str, Any]]:
    """Rows {"system", "model", "mode", "concurrency", "step_ms_median"} of one model."""
    try:
        rows = json.loads(Path(path).read_text())["rows"]
        named = [row for row in rows if row["model"].lower() == model.lower()]
        found = [
            {key: row[key] for key in ("system", "mode", "concurrency")}
            | {"step_ms": float(row["step_ms_median"])}
            for row in named
            if "step_ms_median" in row
        ]
    except OSError as error:
        raise LoadError(f"anchors {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"anchors {path}: expected an object with rows of system, model, mode, concurrency and "
            f"step_ms_median; {type(error).__name__}: {error}"
        ) from error
    if not found:
        raise UsageError(f"anchors {path} have no step times of {model}")
    return found


def steady_decode(
    rows: Sequence[dict[str, Any]], peers: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Tokens per second of steps alone: concurrency x acceptance length / step. A peer's step is
    given the acceptance lengths that the same method had here."""
    steps = _our_steps(rows)
    timed = [row for row in rows if (row["method"], row["concurrency"]) in steps]
    found = [_steady("jaxspec", steps[row["method"], row["concurrency"]], row) for row in timed]
    for peer in peers:
        at = "none" if peer["mode"] == "plain" else peer["mode"], peer["concurrency"]
        same = [row for row in timed if (row["method"], row["concurrency"]) == at]
        found += [_steady(peer["system"], peer["step_ms"], row) for row in same]
    return sorted(found, key=lambda one: one["concurrency"])


def _our_steps(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, int], float]:
    """Of a method at a concurrency, whatever was accepted: a step's time does not depend on it."""
    steps = defaultdict(list)
    for row in rows:
        if row["step_ms"]:
            steps[row["method"], row["concurrency"]].append(row["step_ms"]["p50"])
    return {at: statistics.median(times) for at, times in steps.items()}


def _steady(system: str, step_ms: float, row: dict[str, Any]) -> dict[str, Any]:
    """A step of this length, with the acceptance of this row of ours; where it was drawn, with the
    mean that it was drawn from."""
    concurrency = row["concurrency"]
    length = row.get("drawn_length", row["speculation"]["mean_acceptance_length"])
    return {
        "concurrency": concurrency,
        "system": system,
        "name": name_of(row),
        "acceptance_of": row.get("acceptance_of", ""),
        "mode": "plain" if row["method"] == "none" else row["method"],
        "step_ms": step_ms,
        "acceptance_length": length,
        "tokens_per_s": 1e3 * concurrency * length / step_ms,
    }


def peer_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """For a person: a line per concurrency and system, a column per contender."""
    names = {row["name"]: row["acceptance_of"] or row["name"] for row in rows}
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    lines = [
        ["", "", *("step ms" for _ in modes), *("tok/s" for _ in names)],
        ["conc", "system", *modes, *names.values()],
    ]
    for concurrency, system in dict.fromkeys((row["concurrency"], row["system"]) for row in rows):
        own = [row for row in rows if (row["concurrency"], row["system"]) == (concurrency, system)]
        steps = {row["mode"]: f"{row['step_ms']:.2f}" for row in own}
        rates = {row["name"]: f"{row['tokens_per_s']:.0f}" for row in own}
        cells = [steps.get(mode, "-") for mode in modes] + [rates.get(name, "-") for name in names]
        lines.append([str(concurrency), system, *cells])
    return ["steady decode: tokens/s = concurrency x acceptance length / step", *aligned(lines)]
