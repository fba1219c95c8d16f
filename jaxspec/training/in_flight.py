"""Limits how far the host runs ahead of the device."""

import time
from collections import deque
from typing import Any

import jax

STEPS_AHEAD = 8


class StepsInFlight:
    """The launched steps that the host has not waited for, at most `STEPS_AHEAD` of them."""

    def __init__(self) -> None:
        self._results: deque[Any] = deque()
        self._waited, self._since = 0.0, time.monotonic()

    def add(self, result: Any) -> None:
        """Adds a result of a launched step; waits for the oldest step if there are too many."""
        self._results.append(result)
        if len(self._results) > STEPS_AHEAD:
            begin = time.monotonic()
            jax.block_until_ready(self._results.popleft())
            self._waited += time.monotonic() - begin

    def share_waited(self) -> float:
        """Share of the time since the last call that the host waited for the device.

        Near 1 the device limits the speed of the run, near 0 the host does.
        """
        now = time.monotonic()
        share = self._waited / max(now - self._since, 1e-9)
        self._waited, self._since = 0.0, now
        return round(share, 3)
