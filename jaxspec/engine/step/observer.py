"""The interface for observers of a running engine: profilers, benchmarks, tests."""

from collections.abc import Callable
from typing import Any

Step = Callable[..., tuple[Any, Any]]
"""One of the step functions: it returns the next state and its other results."""


class StepObserver:
    """Observes an engine's loop without changing it. Subclasses override the methods they need."""

    def step_begins(self, running: int) -> None:
        """Called when a step begins; `running` requests have a slot."""

    def program(self, step: Step, inputs: tuple[Any, ...], static: dict[str, Any]) -> None:
        """Called when a program is about to run on these inputs."""

    def step_ends(self) -> None:
        """Called when a step has ended without an exception."""
