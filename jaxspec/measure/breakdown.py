"""What the parts of a speculative step take when each is a program of its own."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.engine.engine import Engine
from jaxspec.engine.step.steps import accept_step, draft_step, verify_step
from jaxspec.measure.occupied import occupied_device
from jaxspec.proposers.device import Drafts

CALLS, ROUNDS = 10, 5
PARTS = ("draft", "verify", "accept")
"""accept: acceptance and commit."""


def part_ms(engine: Engine, batch: int, context: int) -> dict[str, float]:
    """Milliseconds of each part, for `batch` requests with `context` committed positions each."""
    plan = engine.plan
    slots = jnp.arange(batch, dtype=jnp.int32)
    num_drafts = jnp.full(batch, plan.width - 1, jnp.int32)
    drafts = Drafts(jnp.full((batch, plan.width - 1), 7, jnp.int32), num_drafts)
    with occupied_device(engine, batch, context) as device:
        verify = lambda: device.run(verify_step, slots, drafts, draws=False)
        verified = verify()
        calls: dict[str, Callable[[], Any]] = {
            "verify": verify,
            "accept": lambda: device.run(accept_step, slots, drafts, verified),
        }
        if plan.drafter:
            programs = plan.decode_programs(batch, plan.width, host_drafts=False, draws=False)
            drafting = programs.drafting
            calls["draft"] = lambda: device.run(draft_step, slots, num_drafts, drafting=drafting)
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
