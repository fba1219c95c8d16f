"""How fast tokens come, without the time in which programs are loaded or compiled."""

import time
from collections.abc import Callable, Hashable
from typing import Any

import jax

from jaxspec.engine.engine import Engine
from jaxspec.engine.event_stream import StreamEvent
from jaxspec.engine.step.observer import Step, StepObserver


class ProgramTimer(StepObserver):
    """Loads or compiles the programs that a running engine lacks, and counts how long that took."""

    def __init__(self, engine: Engine):
        self.device = engine.loop.device
        self.seconds = 0.0
        self.programs = 0
        """Programs that had to be made."""
        self._seen: set[Hashable] = set()

    def program(self, step: Step, inputs: tuple[Any, ...], static: dict[str, Any]) -> None:
        shapes = tuple(leaf.shape for leaf in jax.tree.leaves(inputs))
        key = step, shapes, tuple(static.items())
        if key in self._seen:
            return
        self._seen.add(key)
        program, begin = self.device.program(step, *inputs, **static), time.perf_counter()
        if not program.is_ready:
            program.make()
            self.programs += 1
            self.seconds += time.perf_counter() - begin


class DecodeClock:
    """The rate at which tokens come after the first one of each prompt, which ends its reading."""

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
