"""The seam for whatever watches an engine at work: profilers, benchmarks, tests."""

from collections.abc import Callable
from typing import Any

Step = Callable[..., tuple[Any, Any]]
"""One of the step functions: it returns the next state, and what it gives besides."""


class StepObserver:
    """Watches an engine's loop, and changes nothing. Subclasses override the methods they need."""

    def step_begins(self, running: int) -> None:
        """A step begins; `running` requests have a slot."""

    def program(self, step: Step, inputs: tuple[Any, ...], static: dict[str, Any]) -> None:
        """A program is about to run on these inputs."""

    def step_ends(self) -> None:
        """The step has ended without an exception."""
