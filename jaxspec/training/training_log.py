"""The reports of a training run: a progress bar, log.jsonl, and a plot of the log."""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, SupportsFloat

import jax
from tqdm import tqdm

from jaxspec.training.health import check_metrics
from jaxspec.training.notices import notice
from jaxspec.training.recipe import Cadence, Optimization
from jaxspec.training.whole_files import write_text_whole, written_whole

Metrics = Mapping[str, SupportsFloat]
MOST_UNREAD = 1000
"""The most steps whose metrics may stay on the device before they are read."""


class TrainingLog:
    """Appends to log.jsonl every few steps, and once more after the last step.

    A resumed run continues the file after step `start`: lines that a killed run wrote beyond that
    step are removed, and so are damaged lines.
    """

    def __init__(
        self,
        folder: Path,
        start: int,
        options: Optimization,
        cadence: Cadence,
        length: int,
        share_waited: Callable[[], float],
    ) -> None:
        self.path = folder / "log.jsonl"
        self._every, self._share_waited = cadence.log_every, share_waited
        self._tokens_per_step = options.batch_size * length
        lines, damaged = read_log(self.path)
        if damaged:
            notice(f"{self.path} has {damaged} damaged lines; they are removed")
        kept = [json.dumps(line) + "\n" for line in lines if line["step"] <= start]
        write_text_whole(self.path, "".join(kept))
        self._file = self.path.open("a")
        # tqdm draws its bar only on terminals: in a file it would add a line per second.
        self._bar = tqdm(
            total=options.steps if options.seconds is None else None,
            initial=start,
            desc=folder.name,
            unit="step",
            mininterval=1.0,
            disable=None,
        )
        self._unread: list[tuple[int, Metrics]] = []
        self._newest: tuple[int, dict[str, float]] | None = None
        self._written = (time.monotonic(), start)
        self._begin = time.monotonic()

    def advance(self, step: int, metrics: Metrics) -> None:
        """Records a step. Metrics are read, which waits for the device, only if that is due."""
        self._bar.update()
        self._unread.append((step, metrics))
        if step % self._every == 0:
            self.write_newest()
        elif len(self._unread) >= MOST_UNREAD:
            self.check()

    def check(self) -> None:
        """Reads the metrics of the steps since the last call. Raises a LoadError that names the
        first step with a metric that is not finite."""
        read = jax.device_get([metrics for _, metrics in self._unread])
        for (step, _), metrics in zip(self._unread, read):
            self._newest = step, {name: float(value) for name, value in metrics.items()}
            check_metrics(*self._newest)
        self._unread.clear()

    def write_newest(self) -> None:
        """Writes the newest step, unless it has been written."""
        self.check()
        if self._newest is not None and self._newest[0] > self._written[1]:
            self.write(*self._newest)

    def write(self, step: int, values: dict[str, float]) -> None:
        now, (then, before) = time.monotonic(), self._written
        rate = (step - before) * self._tokens_per_step / max(now - then, 1e-9)
        self._written = (now, step)
        line = {
            "step": step,
            **values,
            "tokens_per_second": round(rate),
            "waited": self._share_waited(),
            "seconds": round(now - self._begin, 2),
        }
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        shown = {name: f"{value:.4g}" for name, value in values.items()}
        self._bar.set_postfix({**shown, "tokens/s": f"{rate:.3g}"}, refresh=False)

    def close(self) -> None:
        self._bar.close()
        self._file.close()


def read_log(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The good lines of a log.jsonl, and the number of damaged ones.

    A last line without a line end is left by a killed run, and counts as neither.
    """
    if not path.exists():
        return [], 0
    *whole, _ = path.read_bytes().split(b"\n")
    entries = [_entry(line) for line in whole]
    lines = [entry for entry in entries if entry is not None]
    return lines, len(whole) - len(lines)


def _entry(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    good = isinstance(entry, dict) and isinstance(entry.get("step"), int)
    return entry if good else None


def plot_log(folder: Path) -> None:
    """Draws log.jsonl as training.png, or says in one line what has to be installed for that."""
    path = folder / "training.png"
    try:
        from matplotlib.figure import Figure
    except ImportError:
        notice(
            f"no {path.name}, because matplotlib is not installed; run pip install "
            "'jaxspec-decode[plot]' and the same command again to have it drawn"
        )
        return
    lines, _ = read_log(folder / "log.jsonl")
    names = ("loss", "acceptance_length", "accuracy")
    shown = [name for name in names if any(name in line for line in lines)]
    if not shown:
        return
    figure = Figure(figsize=(5 * len(shown), 3.2), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown):
        drawn = [line for line in lines if isinstance(line.get(name), int | float)]
        axes.plot([line["step"] for line in drawn], [line[name] for line in drawn])
        axes.set(xlabel="step", title=name.replace("_", " "))
    with written_whole(path) as unfinished:
        figure.savefig(unfinished, dpi=110, format="png")
