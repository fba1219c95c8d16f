"""Whether requests whose texts begin alike can share pages."""

import dataclasses
import logging
import math
from functools import partial

import jax

from jaxspec.cache.cache import Cache
from jaxspec.engine.plan.options import EngineOptions
from jaxspec.engine.plan.plan import Plan
from jaxspec.engine.step.io import Models
from jaxspec.proposers.device import Recalls, can_skip_tokens, looks_ahead

log = logging.getLogger("jaxspec")


def with_prefix_caching(plan: Plan, models: Models, options: EngineOptions) -> Plan:
    """The plan, with a prefix cache if it is wanted and possible."""
    cache: Cache = jax.eval_shape(partial(models.target.new_cache, 1, 1, models.page_size))
    saves = not cache.in_pages
    if options.num_snapshots and not (saves and options.prefix_caching):
        why = "prefix_caching is off" if saves else "the target has no layers that keep a state"
        log.warning("num_snapshots has no effect: %s", why)
    if not options.prefix_caching:
        return plan
    reason = why_not(models, cache)
    if reason is None and saves and options.num_snapshots == 0:
        reason = "num_snapshots is 0, and the target has layers that keep a state per request"
    if reason is not None:
        log.info("prefix_caching has no effect: %s", reason)
        return plan
    recalls = any(isinstance(proposer, Recalls) for proposer in models.proposers)
    ahead = max(map(looks_ahead, models.proposers), default=0)
    return dataclasses.replace(
        plan,
        prefix_caching=True,
        saves_every=_boundaries(plan) if saves else 0,
        recalls=recalls,
        looks_ahead=ahead,
    )


def without_room_for_states(plan: Plan) -> Plan:
    """The plan without a prefix cache, because not even one state could be saved."""
    log.info("prefix_caching has no effect: there is no room for saved states")
    return dataclasses.replace(plan, prefix_caching=False, saves_every=0)


def _boundaries(plan: Plan) -> int:
    """States are saved at multiples of this: at ends of pages and, with `exact`, only at those that
    are ends of chunks, because a state after chunks of other sizes may have other bits."""
    return math.lcm(plan.page_size, plan.shapes.widest_chunk) if plan.exact else plan.page_size


def why_not(models: Models, cache: Cache) -> str | None:
    """Why requests cannot begin after pages that others have filled; None if they can. `cache` is
    the target's."""
    if models.synthetic:
        return "with synthetic_acceptance the tokens are not the target's"
    if not cache.can_be_saved:
        return "the target has layers that keep something per request and cannot copy it"
    for proposer in models.proposers:
        if not can_skip_tokens(proposer):
            return f"{type(proposer).__name__} has to see every token, as it has no `recall`"
    return None
