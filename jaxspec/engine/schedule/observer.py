"""The seam for whatever watches an engine at work: profilers, benchmarks, tests."""

from typing import Any

from jaxspec.engine.step.device import Step


class StepObserver:
    """Watches an engine's loop, and changes nothing. Subclasses override the methods they need."""

    def step_begins(self, running: int) -> None:
        """A step begins; `running` requests have a slot."""

    def program(self, step: Step, inputs: tuple[Any, ...], static: dict[str, Any]) -> None:
        """A program is about to run on these inputs."""

    def step_ends(self) -> None:
        """The step has ended without an exception."""
