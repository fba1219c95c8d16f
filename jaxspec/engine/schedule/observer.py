"""The seam for whatever watches an engine at work: profilers, benchmarks, tests."""

from typing import Any

from jaxspec.engine.step.device import Step


class StepObserver:
    """Is told what the loop does. Subclasses override what they want to know; they change
    nothing."""

    def step_begins(self, running: int) -> None:
        """A step begins, with so many requests running."""

    def program(self, step: Step, inputs: tuple[Any, ...], static: dict[str, Any]) -> None:
        """A program is about to run on these inputs."""

    def step_ends(self) -> None:
        """The step has ended without an exception."""
