"""Adaptive engines that compile only the widths that a test runs."""

import pytest

from jaxspec.engine import calls
from jaxspec.engine.adapt.even import tokens_each
from jaxspec.engine.adapt.loop_costs import Costs
from jaxspec.engine.setup import build


def use_known_costs(monkeypatch: pytest.MonkeyPatch, per_token: float = 0.05) -> None:
    """Engines that are made from now on take step times from here instead of measuring them, and
    make each program when a step needs it. Otherwise an adaptive engine compiles its programs for
    all widths before the first step, also those that a test never chooses."""

    def known(device, plan) -> Costs:
        sizes = [(b, width) for b in plan.shapes.batch_sizes for width in plan.choices_of(b)]
        return {size: 1.0 + per_token * tokens_each(size[1]) for size in sizes}

    monkeypatch.setattr(build, "measure_costs", known)
    monkeypatch.setattr(calls, "make_first_programs", lambda *_: False)
