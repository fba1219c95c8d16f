"""A loop from models, parameters and options: layout, memory, empty state."""

import dataclasses
from functools import partial

import jax

from jaxspec.engine.adapt.width import AdaptiveWidth
from jaxspec.engine.plan.options import EngineOptions
from jaxspec.engine.plan.plan import Plan, plan_engine, synthetic_of
from jaxspec.engine.schedule.drivers import DRIVERS
from jaxspec.engine.schedule.loop import Loop
from jaxspec.engine.setup import memory
from jaxspec.engine.setup.step_costs import measure_costs
from jaxspec.engine.setup.warmup import temporaries
from jaxspec.engine.step.io import Models, Params
from jaxspec.engine.step.programs import Device
from jaxspec.engine.step.state import EngineState, empty_state
from jaxspec.models.parameters import pool_for
from jaxspec.proposers.methods import METHODS
from jaxspec.text.tokenizer import Tokenizer


def build_loop(
    models: Models, params: Params, tokenizer: Tokenizer | None, options: EngineOptions
) -> Loop:
    """An idle loop with empty pools."""
    plan = plan_engine(models, options)
    synthetic = synthetic_of(options.synthetic_acceptance, plan.block_size - 1)
    models = dataclasses.replace(models, synthetic=synthetic is not None)
    if synthetic is not None:
        params = params | {"synthetic": synthetic.on_device}
    pages = options.num_pages or _pages_that_fit(models, params, plan, options.memory_fraction)
    plan = dataclasses.replace(plan, num_pages=pages + 1)
    new_state = partial(_new_state, models, plan)
    device = Device(models, params, new_state())
    host = METHODS[plan.method].host
    proposer = None if host is None else host(options)
    spans = AdaptiveWidth(measure_costs(device, plan)) if plan.tiers else None
    return Loop(device, new_state, plan, DRIVERS[plan.driver], tokenizer, proposer, spans)


def _new_state(models: Models, plan: Plan) -> EngineState:
    target, drafter = models.target, models.drafter
    pool = pool_for(target.config.decoder, plan.num_pages, plan.page_size, target.dtype)
    draft_pool = None
    if drafter is not None:
        draft_pool = pool_for(drafter.config.decoder, plan.num_pages, plan.page_size, drafter.dtype)
    positions = plan.max_model_len + plan.block_size if plan.keeps_tokens else 0
    return empty_state(pool, draft_pool, plan.num_slots, plan.max_pages, positions)


def _pages_that_fit(models: Models, params: Params, plan: Plan, memory_fraction: float) -> int:
    """All that the slots could ever use, or as much as the device has room for."""
    useful = plan.num_slots * plan.max_pages
    free = memory.free_bytes(memory_fraction)
    if free is None:
        return useful

    def needed(pages: int) -> int:
        state = jax.eval_shape(
            partial(_new_state, models, dataclasses.replace(plan, num_pages=pages + 1))
        )
        return temporaries(Device(models, params, state), plan)

    per_page = memory.bytes_per_page(models, plan.page_size)
    return memory.pages_that_fit(free, per_page, useful, needed, least=plan.max_pages)
