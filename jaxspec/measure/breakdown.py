"""What the parts of a speculative step take when each is a program of its own."""

import dataclasses
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jaxspec.engine.engine import Engine
from jaxspec.engine.setup.timing import seconds_per_call
from jaxspec.engine.step.state import EngineState
from jaxspec.engine.step.upload import filled

CALLS, ROUNDS = 10, 5
PARTS = ("draft", "verify", "accept")
"""accept: acceptance and commit."""


def part_ms(engine: Engine, batch: int, context: int) -> dict[str, float]:
    """Milliseconds of each part, for `batch` requests with `context` committed positions each."""
    engine.loop.land_all()  # a step that was launched before the last reply was read
    device, most_drafts = engine.loop.device, engine.loop.plan.width - 1
    slots = jnp.arange(batch, dtype=jnp.int32)
    drafts = filled((batch, most_drafts), 7)
    num_drafts = filled((batch,), most_drafts)
    verify = lambda: device.run("verify_step", slots, drafts, num_drafts, draws=False)
    calls: dict[str, Callable[[], Any]] = {"verify": verify}
    if engine.loop.plan.drafter:
        calls["draft"] = lambda: device.run("draft_step", slots)
    with _seated(engine, batch, context):
        verified = verify()
        calls["accept"] = lambda: device.run("accept_step", slots, drafts, verified)
        return {part: _milliseconds(calls[part]) for part in PARTS if part in calls}


def _milliseconds(call: Callable[[], Any]) -> float:
    return 1e3 * statistics.median(seconds_per_call(call, CALLS, ROUNDS))


@contextmanager
def _seated(engine: Engine, batch: int, context: int) -> Iterator[None]:
    """Slots of an idle engine as if `context` positions had been committed; emptied afterwards."""
    assert engine.loop.idle, "requests are running"
    device, plan = engine.loop.device, engine.loop.plan
    pages = 1 + np.arange(batch * plan.max_pages).reshape(batch, -1) % (plan.num_pages - 1)
    device.state = _with_slots(device.state, pages, context, plan.max_model_len)
    try:
        yield
    finally:
        device.state = _with_slots(device.state, np.zeros_like(pages), 0, 0)


def _with_slots(
    state: EngineState | None, pages: Int[np.ndarray, "batch max_pages"], length: int, limit: int
) -> EngineState:
    """The first slots with these pages, length and limit; the others empty."""
    assert state is not None, "the engine's state was lost"
    num_slots, batch = len(state.lengths), len(pages)
    per_slot = lambda value: jnp.asarray([value] * batch + [0] * (num_slots - batch), jnp.int32)
    page_table = np.zeros(state.page_table.shape, np.int32)
    page_table[:batch] = pages
    return dataclasses.replace(
        state,
        page_table=jnp.asarray(page_table),
        lengths=per_slot(length),
        limits=per_slot(limit),
    )
