"""How far a run is: by its steps, or by the clock."""

import itertools
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import jax

from jaxspec.training.recipe import Optimization

Turn = tuple[int, float]
"""Number of a step, from 1 on, and the share of the run that is behind it."""
STEPS_AHEAD = 8


def turns(options: Optimization, start: int) -> Iterator[Turn]:
    """The steps after the first `start`; by the clock there is no start but the beginning."""
    if options.seconds is not None:
        return timed_turns(options.seconds)
    return ((done, (done - 1) / options.steps) for done in range(start + 1, options.steps + 1))


def timed_turns(seconds: float) -> Iterator[Turn]:
    """As many as end in time. The first compiles: that comes off the time, not off the warm-up."""
    end = time.monotonic() + seconds
    yield 1, 0.0
    compiled = time.monotonic()
    for done in itertools.count(2):
        now = time.monotonic()
        if now >= end:
            return
        yield done, (now - compiled) / (end - compiled)


class Lead:
    """Keeps the host a few steps ahead of the device, and counts how long it waits for it."""

    def __init__(self) -> None:
        self._running: deque[Any] = deque()
        self._waited, self._since = 0.0, time.monotonic()

    def launched(self, result: Any) -> None:
        self._running.append(result)
        if len(self._running) > STEPS_AHEAD:
            begin = time.monotonic()
            jax.block_until_ready(self._running.popleft())
            self._waited += time.monotonic() - begin

    def share_waited(self) -> float:
        """Since the last question: near 1 the device sets the pace, near 0 the host does."""
        now = time.monotonic()
        share = self._waited / max(now - self._since, 1e-9)
        self._waited, self._since = 0.0, now
        return round(share, 3)
