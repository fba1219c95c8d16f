"""How many pages and saved states an engine has room for."""

import dataclasses
import logging
from collections.abc import Callable

import jax

from jaxspec.engine.plan.options import EngineOptions
from jaxspec.engine.plan.plan import Plan
from jaxspec.engine.plan.sharing import without_room_for_states
from jaxspec.engine.setup import memory
from jaxspec.engine.setup.room import bytes_of_state
from jaxspec.engine.step.io import Models
from jaxspec.models.parameters import num_bytes
from jaxspec.proposers.device import Params
from jaxspec.sampling import PIECE

log = logging.getLogger("jaxspec")

SNAPSHOTS_PER_SLOT = 4
LARGEST_IN_TRIALS = 3
"""When XLA tries kernels, it may need this many arrays as large as the largest weight."""
SHARE_OF_SNAPSHOTS = 8
"""Saved states get at most the memory for caches, divided by this."""


def with_pools(models: Models, params: Params, plan: Plan, options: EngineOptions) -> Plan:
    """The plan with its numbers of saved states and of pages. If the options leave them open, there
    are as many as can be used, or fewer if only these fit into the device's memory."""
    free = memory.free_bytes(options.memory_fraction, models.shards.count)
    pages = options.num_pages
    if plan.saves_every:
        wanted = options.num_snapshots
        if wanted is None:
            room = None if free is None else free - _temporary_bytes(models, params, plan)
            wanted = _snapshots_that_fit(models, plan, room, pages or 0)
        plan = dataclasses.replace(plan, num_snapshots=wanted)
        plan = plan if wanted else without_room_for_states(plan)
    if pages is None:
        pages = plan.num_slots * plan.max_pages
        if free is not None:
            pages = _pages_that_fit(models, params, plan, free, useful=pages)
    return dataclasses.replace(plan, num_pages=pages + 1)


def _snapshots_that_fit(models: Models, plan: Plan, room: int | None, pages: int) -> int:
    """A few saved states for every slot, or fewer if only these fit into their share of the `room`
    that the slots and `pages` pages leave."""
    useful = SNAPSHOTS_PER_SLOT * plan.num_slots
    if room is None:
        return useful
    size = _size_of_state(models, plan)
    for_caches = max(room - size(num_pages=pages + 1), 0)
    each = size(num_snapshots=1) - size()
    fitting = for_caches // SHARE_OF_SNAPSHOTS // each
    log.info("%d states may be saved, of %.3f GiB each", min(useful, fitting), each / 2**30)
    return min(useful, fitting)


def _pages_that_fit(models: Models, params: Params, plan: Plan, free: int, useful: int) -> int:
    """The `useful` pages, or fewer if only these fit into the device's memory."""
    size = _size_of_state(models, plan)
    return memory.pages_that_fit(
        free - size(),
        size(num_pages=2) - size(),
        useful,
        _temporary_bytes(models, params, plan),
        least=plan.max_pages,
    )


def _size_of_state(models: Models, plan: Plan) -> Callable[..., int]:
    """A function that returns the bytes of each device's state with this plan and only the trash
    page, or with changes to its sizes."""

    def size(**changes: int) -> int:
        sized = dataclasses.replace(plan, **{"num_pages": 1, **changes})
        return bytes_of_state(models, sized)

    return size


def has_room_for_trials(models: Models, params: Params, plan: Plan) -> bool:
    """Whether memory is left for XLA to compile while steps run. On a GPU it tries kernels with
    inputs that it makes, the largest of which are as large as the largest weight."""
    free = memory.free_bytes(1.0, models.shards.count)
    largest = max(num_bytes(leaf) for leaf in jax.tree.leaves(params))
    needed = LARGEST_IN_TRIALS * largest + _temporary_bytes(models, params, plan)
    return free is None or free >= needed


def _temporary_bytes(models: Models, params: Params, plan: Plan) -> int:
    """Bytes that the largest step may need beside its arguments."""
    batch = max(plan.shapes.batch_sizes)
    in_prefill = max(batch * width for batch, width in plan.shapes.prefill_shapes)
    width = max(plan.width, *plan.widths, 1)
    in_decode = batch * width
    rows, with_logits = max(in_prefill, in_decode + plan.beside), max(in_decode + 1, PIECE)
    kept = memory.bytes_until_commit(models.target, batch, width)
    vocab_size = models.target.vocab_size
    return memory.temporary_bytes(params, vocab_size, rows, with_logits, draws=True, kept=kept)
