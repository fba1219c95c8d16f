"""Adaptive engines that compile only the widths that a test runs."""

import pytest

from jaxspec.engine import calls
from jaxspec.engine.setup import build


def use_known_costs(monkeypatch: pytest.MonkeyPatch, per_token: float = 0.05) -> None:
    """Engines that are made from now on take step times from here instead of measuring them, and
    make each program when a step needs it. Otherwise an adaptive engine compiles its programs for
    all widths before the first step, also those that a test never chooses."""

    def known(device, plan) -> dict[tuple[int, int], float]:
        sizes = plan.shapes.batch_sizes
        return {(size, w): 1.0 + per_token * w for size in sizes for w in plan.widths_of(size)}

    monkeypatch.setattr(build, "measure_costs", known)
    monkeypatch.setattr(calls, "make_first_programs", lambda *_: False)
