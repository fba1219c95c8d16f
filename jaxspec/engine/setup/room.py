"""Whether an engine's state can fit into the device's memory, before any of it is made."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import jax

from jaxspec.engine.plan.plan import Plan
from jaxspec.engine.programs.fingerprint import fingerprint
from jaxspec.engine.programs.store import ProgramStore
from jaxspec.engine.step.io import Models
from jaxspec.engine.step.sharded import state_over_shards
from jaxspec.engine.step.state import EngineState, empty_state
from jaxspec.errors import LoadError, is_out_of_memory
from jaxspec.models.parameters import num_bytes

LARGEST_POOL = 2**31 - 1
"""Positions of a pool: a position is a 32-bit integer on the device."""
REMEDY = "lower max_batch, max_model_len, num_pages, page_size or num_snapshots"


def new_state(models: Models, plan: Plan, store: ProgramStore | None = None) -> EngineState:
    """An empty state. Raises a LoadError if the device has no memory for it."""
    with refused_if_too_large(plan):
        kept = None if store is None else _kept(store, models, plan)
        return _jitted(models, plan)() if kept is None else kept()


def check_room(models: Models, plan: Plan) -> None:
    """Refuses a state that is larger than all memory of the device, or that has more positions than
    32-bit integers can count. Without this, a CPU would begin to fill its memory."""
    positions = plan.num_pages * plan.page_size
    if positions > LARGEST_POOL:
        raise LoadError(
            f"{_what(plan)} are more than the {LARGEST_POOL} positions that a cache can have; "
            f"{REMEDY}"
        )
    needed, limit = bytes_of_state(models, plan), _device_bytes()
    if limit is not None and needed > limit:
        raise LoadError(
            f"{_what(plan)} need {needed / 1e9:.1f} GB, the device has {limit / 1e9:.1f} GB; "
            f"{REMEDY}"
        )


def bytes_of_state(models: Models, plan: Plan) -> int:
    """Bytes of an empty state on each device."""
    return num_bytes(jax.eval_shape(partial(_empty, models, plan)))


@contextmanager
def refused_if_too_large(plan: Plan) -> Iterator[None]:
    """Turns an out-of-memory error into one that says what to lower."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise LoadError(
            f"{_what(plan)} do not fit into the memory left beside the weights; {REMEDY}"
        ) from error


def _empty(models: Models, plan: Plan) -> EngineState:
    return empty_state(models, **_sizes(plan))


@lru_cache(maxsize=8)
def _jitted(models: Models, plan: Plan) -> Callable[[], EngineState]:
    """A function that makes the state where it belongs, on one device or on several."""
    make, count = partial(_empty, models, plan), models.shards.count
    return make if count == 1 else state_over_shards(make, count)


def _sizes(plan: Plan) -> dict[str, int | None]:
    return {
        "num_slots": plan.num_slots,
        "num_pages": plan.num_pages,
        "max_pages": plan.max_pages,
        "positions": plan.positions,
        "num_drafts": plan.width - 1 if plan.shares_tokens else None,
        "num_snapshots": plan.num_snapshots,
    }


def _kept(store: ProgramStore, models: Models, plan: Plan) -> jax.stages.Compiled | None:
    """The program that makes the state, loaded or compiled; None if its models are not ours."""
    sizes, count = _sizes(plan), models.shards.count
    name = fingerprint("empty_state", models, sizes, ())
    if name is None:
        return None

    def make() -> tuple[jax.stages.Compiled, Any]:
        jitted: Any = empty_state if count == 1 else _jitted(models, plan)
        traced = jitted.trace(models, **sizes) if count == 1 else jitted.trace()
        return traced.lower().compile(), jax.eval_shape(partial(_empty, models, plan))

    return store.load_or_make(name, store.find(name), make, count)


def _what(plan: Plan) -> str:
    saved = f", {plan.num_snapshots} saved states" if plan.num_snapshots else ""
    return (
        f"{plan.num_slots} slots{saved} and {plan.num_pages - 1} pages of {plan.page_size} "
        f"positions for a context of {plan.max_model_len}"
    )


def _device_bytes() -> int | None:
    """All memory of the device, which for a CPU is the machine's; None if that is unknown."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"]
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not on this system
        return None
