"""Other systems' step times, from a file, beside ours on equal terms: steady decode."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxspec.errors import LoadError, UsageError


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
    """Tokens per second of steps alone: concurrency x acceptance length / step. A peer's drafting
    step is given the acceptance length that ours had."""
    found = []
    for concurrency in sorted({row["concurrency"] for row in rows}):
        ours = [row for row in rows if row["concurrency"] == concurrency]
        lengths = [row["speculation"]["mean_acceptance_length"] for row in ours]
        found += [
            _steady("jaxspec", row["method"], concurrency, row["step_ms"]["p50"], length)
            for row, length in zip(ours, lengths)
            if row["step_ms"]
        ]
        found += [
            _steady(
                peer["system"],
                peer["mode"],
                concurrency,
                peer["step_ms"],
                1.0 if peer["mode"] == "plain" else max(lengths),
            )
            for peer in peers
            if peer["concurrency"] == concurrency
        ]
    return found


def _steady(
    system: str, mode: str, concurrency: int, step_ms: float, length: float
) -> dict[str, Any]:
    return {
        "concurrency": concurrency,
        "system": system,
        "mode": "plain" if mode == "none" else mode,
        "step_ms": step_ms,
        "acceptance_length": length,
        "tokens_per_s": 1e3 * concurrency * length / step_ms,
    }


def peer_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """For a person."""
    width = max(len(row["system"]) for row in rows)
    lines = [
        "steady decode: tokens/s = concurrency x acceptance length / step",
        f"conc  {'system':<{width}}  mode      step ms  accept      tok/s",
    ]
    return lines + [
        f"{row['concurrency']:>4}  {row['system']:<{width}}  {row['mode']:<8}"
        f"{row['step_ms']:>9.3f}{row['acceptance_length']:>8.2f}{row['tokens_per_s']:>11.1f}"
        for row in rows
    ]
