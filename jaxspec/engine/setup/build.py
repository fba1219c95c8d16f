"""Makes a loop from models, parameters and options: its plan, memory and empty state."""

from functools import partial

import jax

from jaxspec.engine.adapt.width import AdaptiveWidth
from jaxspec.engine.plan.options import EngineOptions
from jaxspec.engine.plan.planning import plan_engine, synthetic_of
from jaxspec.engine.programs.store import open_store
from jaxspec.engine.schedule.loop import Loop
from jaxspec.engine.setup.copied_head import say_if_unread
from jaxspec.engine.setup.inboxes import exchange_by_inboxes, with_inboxes
from jaxspec.engine.setup.placement import spread_params, with_synthetic
from jaxspec.engine.setup.pools import with_pools
from jaxspec.engine.setup.processes import as_first_process
from jaxspec.engine.setup.room import check_room, new_state
from jaxspec.engine.setup.small_pieces import spacers_on
from jaxspec.engine.setup.step_costs import costs_beside, measure_costs
from jaxspec.engine.step.device import Device
from jaxspec.engine.step.io import Models
from jaxspec.engine.step.lateness import ExchangingDevice
from jaxspec.proposers.device import Params
from jaxspec.proposers.drafters import drafter_in
from jaxspec.proposers.methods import METHODS
from jaxspec.text.tokenizer import Tokenizer


def build_loop(
    models: Models, params: Params, tokenizer: Tokenizer | None, options: EngineOptions
) -> Loop:
    """An idle loop with empty pools."""
    models, plan = plan_engine(models, options)
    params = spread_params(models, params)
    synthetic = synthetic_of(options.synthetic_acceptance, plan.block_size - 1)
    if synthetic is not None:
        params = with_synthetic(params, synthetic, models.shards.count)
    say_if_unread(drafter_in(models.proposers))
    plan = with_pools(models, params, plan, options)
    check_room(models, plan)
    store = open_store(options.cache_dir)
    empty = with_inboxes(partial(new_state, models, plan, store), models)
    kind = ExchangingDevice if exchange_by_inboxes(models) else Device
    device = kind(models, params, empty(), store, options.step_timeout)
    device.spacers = spacers_on(models.shards.count)
    host = METHODS[plan.method].host
    proposer = None if host is None else host(options)
    adaptive = None
    if plan.widths:
        costs = as_first_process(measure_costs(device, plan))
        # Processes that each time their own steps would not choose the same widths.
        learns = jax.process_count() == 1
        adaptive = AdaptiveWidth(costs, plan.shares_tokens, learns, costs_beside(plan, costs))
    return Loop(device, empty, plan, tokenizer, proposer, adaptive)
