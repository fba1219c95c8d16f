"""What a person sees while something long runs: a bar in a terminal, and afterwards a line."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

Report = Callable[[int, int], None]
"""A function that is called with how much is done and how much there is to do."""

THREAD = "progress bar"
TICK_SECONDS, LEAST_SECONDS = 0.2, 0.05
FORMAT = "{desc} {percentage:3.0f}% |{bar:30}| {n_fmt}/{total_fmt} [{elapsed}]"
FORMAT_OF_GROWING = "{desc}: {n_fmt} of {total_fmt} ready [{elapsed}]"
FORMAT_OF_BEGINNING = "{desc} [{elapsed}]"


class Bar:
    """A progress bar whose clock also runs while nothing is reported, so that the program does not
    seem to hang."""

    def __init__(self, name: str, unit: str = "", shown: bool = True, grows: bool = False):
        """`grows` says that the total grows during the work, so no percentage is shown."""
        self._format = FORMAT_OF_GROWING if grows else FORMAT
        self._bar: Any = tqdm(
            desc=name,
            unit=unit,
            unit_scale=unit == "B",
            bar_format=FORMAT_OF_BEGINNING,
            disable=None if shown else True,  # None: disabled unless stderr is a terminal
            leave=False,
            file=sys.stderr,
        )
        self._drawn = 0.0
        self._ended = threading.Event()
        self._clock = threading.Thread(target=self._tick, name=THREAD, daemon=True)
        if not self._bar.disable:
            self._clock.start()

    def report(self, done: int, total: int) -> None:
        if not self._bar.disable:
            self._bar.bar_format = self._format
            self._bar.total, self._bar.n = total, done
            if time.perf_counter() - self._drawn > LEAST_SECONDS or done == total:
                self._draw()

    def close(self) -> None:
        self._ended.set()
        if self._clock.is_alive():
            self._clock.join()
        self._bar.close()

    def _tick(self) -> None:
        while not self._ended.wait(TICK_SECONDS):
            self._draw()

    def _draw(self) -> None:
        self._drawn = time.perf_counter()
        self._bar.refresh()


@contextmanager
def bar(name: str, unit: str = "", shown: bool = True, grows: bool = False) -> Iterator[Report]:
    """Shows a progress bar if stderr is a terminal, and yields the function that reports to it."""
    opened = Bar(name, unit, shown, grows)
    try:
        yield opened.report
    finally:
        opened.close()


class Stopwatch:
    """Measures the seconds since it was made."""

    def __init__(self) -> None:
        self.begin = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.begin


def bytes_in_words(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def seconds_in_words(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.1f} min"
