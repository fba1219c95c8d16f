"""Step times of other systems, read from a file, and compared with ours by steady decode rates."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from jaxspec.errors import LoadError, UsageError
from jaxspec.measure.results import Row, grouped, name_of


def read_peers(path: str, model: str) -> list[Row]:
    """Reads the rows of one model, each {"system", "model", "mode", "concurrency",
    "step_ms_median"}."""
    try:
        peers = _rows_of_model(Path(path).read_text(), model)
    except OSError as error:
        raise LoadError(f"anchors {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"anchors {path}: expected an object with rows of system, model, mode, concurrency and "
            f"step_ms_median; {type(error).__name__}: {error}"
        ) from error
    if not peers:
        raise UsageError(f"anchors {path} have no step times of {model}")
    return peers


def _rows_of_model(text: str, model: str) -> list[Row]:
    rows = [row for row in json.loads(text)["rows"] if row["model"].lower() == model.lower()]
    return [
        {key: row[key] for key in ("system", "mode", "concurrency")}
        | {"step_ms": float(row["step_ms_median"])}
        for row in rows
        if "step_ms_median" in row
    ]


def steady_decode(rows: Sequence[Row], peers: Sequence[Row]) -> list[Row]:
    """Tokens per second of decode steps alone: concurrency x acceptance length / step time. For
    another system, the acceptance lengths are those of the same method in our rows."""
    steps = _our_steps(rows)
    timed = [row for row in rows if _method_and_concurrency(row) in steps]
    steady = [_steady("jaxspec", steps[_method_and_concurrency(row)], row) for row in timed]
    ours = grouped(timed, _method_and_concurrency)
    for peer in peers:
        method = "none" if peer["mode"] == "plain" else peer["mode"]
        same = ours.get((method, peer["concurrency"]), [])
        steady += [_steady(peer["system"], peer["step_ms"], row) for row in same]
    return sorted(steady, key=lambda row: row["concurrency"])


def _method_and_concurrency(row: Row) -> tuple[str, int]:
    return row["method"], row["concurrency"]


def _our_steps(rows: Sequence[Row]) -> dict[tuple[str, int], float]:
    """Step time by method and concurrency; it does not depend on the acceptance."""
    timed = [row for row in rows if row["step_ms"]]
    return {
        key: statistics.median(row["step_ms"]["p50"] for row in same)
        for key, same in grouped(timed, _method_and_concurrency).items()
    }


def _steady(system: str, step_ms: float, row: Row) -> Row:
    """The rate of a system whose steps take `step_ms`, with the acceptance length of our `row`. If
    that acceptance is synthetic, its length is the mean of the distribution it was drawn from."""
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
