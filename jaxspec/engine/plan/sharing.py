"""Whether requests whose texts begin alike can share pages."""

import dataclasses
import logging
from functools import partial

import jax

from jaxspec.engine.plan.options import EngineOptions
from jaxspec.engine.plan.plan import Plan
from jaxspec.engine.step.io import Models
from jaxspec.proposers.device import Recalls, can_skip_tokens, looks_ahead

log = logging.getLogger("jaxspec")


def with_prefix_caching(plan: Plan, models: Models, options: EngineOptions) -> Plan:
    """The plan, with a prefix cache if it is wanted and possible."""
    if not options.prefix_caching:
        return plan
    if (reason := why_not(models)) is not None:
        log.info("prefix_caching has no effect: %s", reason)
        return plan
    recalls = any(isinstance(proposer, Recalls) for proposer in models.proposers)
    ahead = max(map(looks_ahead, models.proposers), default=0)
    return dataclasses.replace(plan, prefix_caching=True, recalls=recalls, looks_ahead=ahead)


def why_not(models: Models) -> str | None:
    """Why requests cannot begin behind pages that others have filled; None if they can."""
    if models.synthetic:
        return "with synthetic_acceptance the tokens are not the target's"
    cache = jax.eval_shape(partial(models.target.new_cache, 1, 1, models.page_size))
    if not cache.in_pages:
        return "the target has layers that keep something per request"
    for proposer in models.proposers:
        if not can_skip_tokens(proposer):
            return f"{type(proposer).__name__} has to see every token, as it has no `recall`"
    return None
