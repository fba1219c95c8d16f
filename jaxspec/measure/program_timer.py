"""Seconds that a run waited for programs, so that its rates can leave them out."""

import time
from collections.abc import Hashable
from typing import Any

import jax

from jaxspec.engine.engine import Engine
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
