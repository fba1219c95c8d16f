"""What a run says while it goes: a progress bar, log.jsonl, and a plot of it."""

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import SupportsFloat

from tqdm import tqdm


class Journal:
    """Lines of log.jsonl from `start` on; lines that a killed run wrote beyond it are dropped."""

    def __init__(self, folder: Path, start: int, steps: int | None, name: str) -> None:
        self.path = folder / "log.jsonl"
        lines = self.path.read_text().splitlines(keepends=True) if self.path.exists() else []
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= start]
        self.path.write_text("".join(kept))
        self._file = self.path.open("a")
        # A bar is for terminals: in a file it would be a line per second.
        self._bar = tqdm(
            total=steps, initial=start, desc=name, unit="step", mininterval=1.0, disable=None
        )
        self._last = (time.monotonic(), start)
        self._begin = time.monotonic()

    def say(self, line: str) -> None:
        """To whoever watches, on a terminal or in a file."""
        print(line, file=sys.stderr, flush=True)

    def advance(self) -> None:
        self._bar.update()

    @property
    def last_step(self) -> int:
        """That was written, or that the run begins after."""
        return self._last[1]

    def write(
        self,
        step: int,
        metrics: Mapping[str, SupportsFloat],
        tokens_per_step: int,
        waited: float,
    ) -> None:
        """`waited` is the share of the time that the host waited for the device."""
        values = {name: float(value) for name, value in metrics.items()}
        now, (then, before) = time.monotonic(), self._last
        rate = (step - before) * tokens_per_step / max(now - then, 1e-9)
        self._last = (now, step)
        line = {
            "step": step,
            **values,
            "tokens_per_second": round(rate),
            "waited": waited,
            "seconds": round(now - self._begin, 2),
        }
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        shown = {name: f"{value:.4g}" for name, value in values.items()}
        self._bar.set_postfix({**shown, "tokens/s": f"{rate:.3g}"}, refresh=False)

    def close(self) -> None:
        self._bar.close()
        self._file.close()


def plot(folder: Path) -> Path | None:
    """Draws log.jsonl as training.png; None where matplotlib is not installed."""
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
