"""Measures how fast tokens are generated, without the time for loading or compiling programs."""

import time
from collections.abc import Callable

from jaxspec.engine.engine import Engine
from jaxspec.engine.event_stream import StreamEvent


class ProgramTimer:
    """Counts the programs for which an engine's steps have waited since the timer was made."""

    def __init__(self, engine: Engine):
        self._clock = engine.loop.device.clock
        self._before = self._clock.waits

    @property
    def programs(self) -> int:
        return self._clock.waits.count - self._before.count

    @property
    def seconds(self) -> float:
        """How long the steps waited for them."""
        return self._clock.waits.seconds - self._before.seconds


class DecodeClock:
    """The rate of tokens, without the first token of each prompt, which belongs to reading it."""

    def __init__(self, waited: Callable[[], float] = lambda: 0.0):
        """`waited` returns seconds that do not count, such as those of compiling."""
        self.tokens = 0
        """Tokens after the first of each prompt."""
        self.seconds = 0.0
        """Seconds from the first token of any prompt to the newest token."""
        self._waited = waited
        self._first: float | None = None
        self._started: set[int] = set()

    def saw(self, event: StreamEvent) -> None:
        now = time.perf_counter() - self._waited()
        if self._first is None:
            self._first = now
        if event.token_ids:
            is_first = event.index not in self._started
            self._started.add(event.index)
            self.tokens += len(event.token_ids) - is_first
            self.seconds = now - self._first

    @property
    def tokens_per_s(self) -> float | None:
        """None if no prompt got a second token."""
        return self.tokens / self.seconds if self.tokens and self.seconds > 0 else None
