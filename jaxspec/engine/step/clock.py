"""Time as requests see it: it stands still while the engine waits for a program to be compiled."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class _Waiting:
    done: float = 0.0
    """Seconds of all waiting that is over."""
    since: float | None = None
    """When the present waiting began."""


class Clock:
    """Seconds, to subtract from each other. One thread may stop it; any thread may read it."""

    def __init__(self) -> None:
        self._waiting = _Waiting()

    def now(self) -> float:
        waiting = self._waiting  # read once: it is replaced as a whole
        return (time.perf_counter() if waiting.since is None else waiting.since) - waiting.done

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Time that passes inside this block does not count."""
        before, since = self._waiting, time.perf_counter()
        try:
            self._waiting = _Waiting(before.done, since)
            yield
        finally:
            self._waiting = _Waiting(before.done + time.perf_counter() - since)
