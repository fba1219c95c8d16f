"""What a speculative step's parts take when each is a program of its own."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.engine.engine import Engine
from jaxspec.engine.step.upload import filled

CALLS, ROUNDS = 10, 5
PARTS = ("draft", "verify", "accept")
"""accept: acceptance and commit."""


def part_ms(engine: Engine, rows: int, context: int) -> dict[str, float]:
    """Milliseconds of each part, with so many slots in the middle of a generation."""
    engine.loop.land_all()  # a step that was launched before the last reply was read
    device, drafts_per_row = engine.loop.device, engine.loop.plan.width - 1
    slots = jnp.arange(rows, dtype=jnp.int32)
    drafts = filled((rows, drafts_per_row), 7)
    num_drafts = filled((rows,), drafts_per_row)
    verify = lambda: device.run("verify_step", slots, drafts, num_drafts, draws=False)
    calls: dict[str, Callable[[], Any]] = {"verify": verify}
    if engine.loop.plan.drafter:
        calls["draft"] = lambda: device.run("draft_step", slots)
    with _seated(engine, rows, context):
        verified = verify()
        calls["accept"] = lambda: device.run("accept_step", slots, drafts, verified)
        return {part: _milliseconds(calls[part]) for part in PARTS if part in calls}


def _milliseconds(call: Callable[[], Any]) -> float:
    """Median over rounds of one of several asynchronous calls in a row."""
    jax.block_until_ready(call())
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(CALLS):
            last = call()
        jax.block_until_ready(last)
        times.append((time.perf_counter() - begin) / CALLS * 1e3)
    return statistics.median(times)


@contextmanager
def _seated(engine: Engine, rows: int, context: int) -> Iterator[None]:
    """Slots of an idle engine as if so many positions had been committed; emptied afterwards."""
    assert engine.loop.idle, "requests are running"
    state, plan = engine.loop.device.state, engine.loop.plan
    pages = np.zeros(state.page_table.shape, np.int32)
    pages[:rows] = 1 + np.arange(rows * plan.max_pages).reshape(rows, -1) % (plan.num_pages - 1)
    integers = lambda value: jnp.asarray(
        np.where(np.arange(state.lengths.shape[0]) < rows, value, 0).astype(np.int32)
    )
    engine.loop.device.state = dataclasses.replace(
        state,
        page_table=jnp.asarray(pages),
        lengths=integers(context),
        limits=integers(plan.max_model_len),
    )
    try:
        yield
    finally:
        engine.loop.device.state = dataclasses.replace(
            engine.loop.device.state,
            page_table=jnp.zeros_like(jnp.asarray(pages)),
            lengths=integers(0),
            limits=integers(0),
        )
