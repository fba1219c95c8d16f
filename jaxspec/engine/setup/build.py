"""A loop from models, parameters and options: layout, memory, empty state."""

import dataclasses
from functools import partial

from jaxspec.engine.adapt.width import AdaptiveWidth
from jaxspec.engine.plan.options import EngineOptions
from jaxspec.engine.plan.plan import Plan
from jaxspec.engine.plan.planning import plan_engine, synthetic_of
from jaxspec.engine.programs.store import open_store
from jaxspec.engine.schedule.loop import Loop
from jaxspec.engine.setup import memory
from jaxspec.engine.setup.placement import spread_params
from jaxspec.engine.setup.processes import as_first_process
from jaxspec.engine.setup.room import bytes_of_state, check_room, new_state
from jaxspec.engine.setup.step_costs import measure_costs
from jaxspec.engine.step.device import Device
from jaxspec.engine.step.io import Models
from jaxspec.proposers.device import Params
from jaxspec.proposers.methods import METHODS
from jaxspec.sampling import PIECE
from jaxspec.text.tokenizer import Tokenizer


def build_loop(
    models: Models, params: Params, tokenizer: Tokenizer | None, options: EngineOptions
) -> Loop:
    """An idle loop with empty pools."""
    models, plan = plan_engine(models, options)
    params = spread_params(models, params)
    synthetic = synthetic_of(options.synthetic_acceptance, plan.block_size - 1)
    if synthetic is not None:
        params = params | {"synthetic": synthetic.on_device}
    pages = options.num_pages or _pages_that_fit(models, params, plan, options.memory_fraction)
    plan = dataclasses.replace(plan, num_pages=pages + 1)
    check_room(models, plan)
    store = open_store(options.cache_dir)
    empty = partial(new_state, models, plan, store)
    device = Device(models, params, empty(), store)
    host = METHODS[plan.method].host
    proposer = None if host is None else host(options)
    adaptive = None
    if plan.widths:
        adaptive = AdaptiveWidth(as_first_process(measure_costs(device, plan)), plan.shares_tokens)
    return Loop(device, empty, plan, tokenizer, proposer, adaptive)


def _pages_that_fit(models: Models, params: Params, plan: Plan, memory_fraction: float) -> int:
    """The most pages that the slots can use, or as many as fit into the device's memory."""
    useful = plan.num_slots * plan.max_pages
    free = memory.free_bytes(memory_fraction, models.shards.count)
    if free is None:
        return useful

    with_pages = lambda pages: dataclasses.replace(plan, num_pages=pages + 1)
    none, one = (bytes_of_state(models, with_pages(pages)) for pages in (0, 1))
    per_page = one - none
    return memory.pages_that_fit(
        free - none,
        per_page,
        useful,
        _temporary_bytes(models, params, plan),
        least=plan.max_pages,
    )


def _temporary_bytes(models: Models, params: Params, plan: Plan) -> int:
    """Bytes that the largest step may need beside its arguments."""
    batch = max(plan.shapes.batch_sizes)
    in_prefill = max(batch * width for batch, width in plan.shapes.prefill_shapes)
    in_decode = batch * max(plan.width, *plan.widths, 1)
    rows, with_logits = max(in_prefill, in_decode), max(in_decode, PIECE)
    vocab_size = models.target.vocab_size
    return memory.temporary_bytes(params, vocab_size, rows, with_logits, draws=True)
