"""Whether decode steps also read chunks of prompts."""

import dataclasses
import logging

from jaxspec.engine.plan.options import EngineOptions
from jaxspec.engine.plan.plan import NOT_DECODING, Plan
from jaxspec.engine.step.io import Models

log = logging.getLogger("jaxspec")


def with_prefill_beside(plan: Plan, models: Models, options: EngineOptions) -> Plan:
    """The plan, with decode steps that also read a prompt if that is wanted and possible."""
    wanted = options.prefill_beside_decoding
    if not wanted:
        return plan
    if (reason := why_not(plan, models)) is not None:
        asked = wanted != EngineOptions.prefill_beside_decoding
        level = logging.WARNING if asked else logging.DEBUG
        log.log(level, "prefill_beside_decoding has no effect: %s", reason)
        return plan
    rows = max(min(wanted, plan.max_model_len) // plan.width, 1)
    return dataclasses.replace(plan, beside=rows * plan.width)


def why_not(plan: Plan, models: Models) -> str | None:
    """Why decode steps cannot read prompts; None if they can."""
    if not getattr(models.target, "rows_may_continue", False):
        return "the target's layers read a chunk of a prompt as one row"
    if plan.num_slots <= NOT_DECODING:
        return f"max_batch is {plan.num_slots}, so a slot never stays free"
    if plan.exact:
        return "exact reads all prompts by one program"
    if plan.reads_before_decoding:
        return "the host reads every result before the next decode step"
    return None
