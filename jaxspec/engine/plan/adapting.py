"""Whether the width of each step is chosen, from which widths, and for which batch sizes."""

import dataclasses

import jax

from jaxspec.engine.plan.options import EngineOptions
from jaxspec.engine.plan.plan import WEIGHTS, Plan
from jaxspec.engine.step.io import Models
from jaxspec.proposers.methods import METHODS

NARROWER_WIDTHS = (1, 4, 8)
"""Widths that an adaptive engine may choose besides the drafter's full width."""


def with_adaptive_widths(plan: Plan, models: Models, options: EngineOptions) -> Plan:
    """The plan, with the widths to choose from."""
    if not plan.drafter or options.adaptive is False:
        return plan
    adapts_from = 1 if options.adaptive else _first_that_pays(plan, models, options)
    if adapts_from is None:
        return plan
    return dataclasses.replace(
        plan,
        widths=(*(narrower for narrower in NARROWER_WIDTHS if narrower < plan.width), plan.width),
        adapts_from=adapts_from,
        shares_tokens=_takes_packed(models),
    )


def _first_that_pays(plan: Plan, models: Models, options: EngineOptions) -> int | None:
    """The smallest batch size for which widths are chosen if the option is None; None if there is
    no such size. It follows from sizes and not from measured times: a step of few tokens takes as
    long as reading the weights, so verifying fewer saves little (docs/notes/verify-budget.md)."""
    decided = options.width is not None or plan.exact or METHODS[plan.method].host is not None
    waits = plan.driver == "lockstep" or jax.default_backend() != "gpu"
    if decided or waits or not _takes_packed(models):
        return None
    sizes = plan.shapes.batch_sizes
    return next((size for size in sizes if size * plan.width > WEIGHTS), None)


def _takes_packed(models: Models) -> bool:
    """Whether the target reads requests of different widths without padding."""
    return getattr(models.target, "takes_packed", False)
