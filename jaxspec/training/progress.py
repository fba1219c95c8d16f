"""The progress of a run, counted in steps or in seconds."""

import itertools
import time
from collections.abc import Iterator

from jaxspec.training.recipe import Optimization

NumberedProgress = tuple[int, float]
"""The number of a step, from 1 on, and the share of the run that was done before it."""


def steps_with_progress(options: Optimization, start: int) -> Iterator[NumberedProgress]:
    """The steps after the first `start`. A run that is limited by time always begins at step 1."""
    if options.seconds is not None:
        return timed_steps(options.seconds)
    return ((step, (step - 1) / options.steps) for step in range(start + 1, options.steps + 1))


def timed_steps(seconds: float) -> Iterator[NumberedProgress]:
    """Steps until the time is up.

    The first step compiles. Its time counts towards the limit but not as progress, so that the
    learning rate still warms up over its whole share of the remaining time.
    """
    end = time.monotonic() + seconds
    yield 1, 0.0
    compiled = time.monotonic()
    for step in itertools.count(2):
        now = time.monotonic()
        if now >= end:
            return
        yield step, (now - compiled) / (end - compiled)
