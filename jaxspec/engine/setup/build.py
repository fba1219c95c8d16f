"""A loop from models, parameters and options: layout, memory, empty state."""

import dataclasses
from functools import partial

import jax

from jaxspec.engine.adapt.width import AdaptiveWidth
from jaxspec.engine.plan.options import EngineOptions
from jaxspec.engine.plan.plan import Plan
from jaxspec.engine.plan.planning import plan_engine, synthetic_of
from jaxspec.engine.schedule.loop import Loop
from jaxspec.engine.setup import memory
from jaxspec.engine.setup.room import check_room, new_state
from jaxspec.engine.setup.step_costs import measure_costs
from jaxspec.engine.setup.warmup import temporaries
from jaxspec.engine.step.device import Device
from jaxspec.engine.step.io import Models
from jaxspec.engine.step.state import EngineState
from jaxspec.proposers.device import Params
from jaxspec.proposers.methods import METHODS
from jaxspec.text.tokenizer import Tokenizer


def build_loop(
    models: Models, params: Params, tokenizer: Tokenizer | None, options: EngineOptions
) -> Loop:
    """An idle loop with empty pools."""
    models, plan = plan_engine(models, options)
    synthetic = synthetic_of(options.synthetic_acceptance, plan.block_size - 1)
    if synthetic is not None:
        params = params | {"synthetic": synthetic.on_device}
    pages = options.num_pages or _pages_that_fit(models, params, plan, options.memory_fraction)
    plan = dataclasses.replace(plan, num_pages=pages + 1)
    check_room(models, plan)
    device = Device(models, params, new_state(models, plan))
    host = METHODS[plan.method].host
    proposer = None if host is None else host(options)
    adaptive = AdaptiveWidth(measure_costs(device, plan)) if plan.widths else None
    return Loop(device, partial(new_state, models, plan), plan, tokenizer, proposer, adaptive)


def _pages_that_fit(models: Models, params: Params, plan: Plan, memory_fraction: float) -> int:
    """The most pages that the slots can use, or as many as fit into the device's memory."""
    useful = plan.num_slots * plan.max_pages
    free = memory.free_bytes(memory_fraction)
    if free is None:
        return useful

    def shapes(pages: int) -> EngineState:
        sized = dataclasses.replace(plan, num_pages=pages + 1)
        return jax.eval_shape(partial(new_state, models, sized))

    def bytes_of_programs(pages: int) -> int:
        return temporaries(Device(models, params, shapes(pages)), plan)

    per_page = memory.num_bytes(shapes(2)) - memory.num_bytes(shapes(1))
    return memory.pages_that_fit(free, per_page, useful, bytes_of_programs, least=plan.max_pages)
