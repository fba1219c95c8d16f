"""The reports of a training run: a progress bar, log.jsonl, and a plot of the log."""

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import SupportsFloat

from tqdm import tqdm

from jaxspec.training.recipe import Cadence, Optimization

Metrics = Mapping[str, SupportsFloat]


class TrainingLog:
    """Appends to log.jsonl every few steps, and once more after the last step.

    A resumed run continues the file after step `start`: lines that a killed run wrote beyond that
    step are removed.
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
        lines = self.path.read_text().splitlines(keepends=True) if self.path.exists() else []
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= start]
        self.path.write_text("".join(kept))
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
        self._newest: tuple[int, Metrics] | None = None
        self._written = (time.monotonic(), start)
        self._begin = time.monotonic()

    def announce(self, line: str) -> None:
        """Prints to stderr, even if that is not a terminal."""
        print(line, file=sys.stderr, flush=True)

    def advance(self, step: int, metrics: Metrics) -> None:
        """Records a step. Its metrics are read, which waits for the device, only if due."""
        self._bar.update()
        self._newest = step, metrics
        if step % self._every == 0:
            self.write(step, metrics)

    def write_newest(self) -> None:
        """Writes the newest step, unless it has been written."""
        if self._newest is not None and self._newest[0] > self._written[1]:
            self.write(*self._newest)

    def write(self, step: int, metrics: Metrics) -> None:
        values = {name: float(value) for name, value in metrics.items()}
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


def plot_log(folder: Path) -> Path | None:
    """Draws log.jsonl as training.png; returns None if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    shown = [name for name in ("loss", "acceptance_length", "accuracy") if name in lines[0]]
    figure = Figure(figsize=(5 * len(shown), 3.2), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown):
        axes.plot([line["step"] for line in lines], [line[name] for line in lines])
        axes.set(xlabel="step", title=name.replace("_", " "))
    path = folder / "training.png"
    figure.savefig(path, dpi=110)
    return path
