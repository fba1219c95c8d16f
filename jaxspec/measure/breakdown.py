"""The times of the parts of a speculative step, each run as a separate program."""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxspec.engine.engine import Engine
from jaxspec.engine.plan.plan import Plan
from jaxspec.engine.setup.timing import seconds_per_call
from jaxspec.engine.step.device import Device
from jaxspec.engine.step.io import Drafting
from jaxspec.engine.step.state import occupied
from jaxspec.engine.step.steps import accept_step, draft_step, verify_step
from jaxspec.proposers.device import Drafts

CALLS, ROUNDS = 10, 5
PARTS = ("draft", "verify", "accept")
"""The parts that are timed; `accept` is acceptance and commit together."""


def part_ms(engine: Engine, batch: int, context: int) -> dict[str, float]:
    """Milliseconds of each part, for `batch` requests with `context` committed tokens each."""
    with engine.borrow_device() as device:
        assert device.state is not None, "the device has no state"
        device.state = occupied(device.state, batch, context, engine.plan.max_model_len)
        calls = _calls(device, engine.plan, batch)
        return {part: _milliseconds(calls[part]) for part in PARTS if part in calls}


def _calls(device: Device, plan: Plan, batch: int) -> dict[str, Callable[[], Any]]:
    most = plan.width - 1
    slots = jax.device_put(np.arange(batch, dtype=np.int32))
    num_drafts = device.integers((), (batch,), most)
    drafts = Drafts(device.integers((), (batch, most), 7), num_drafts)
    verify = partial(device.run, verify_step, slots, drafts, draws=False)
    accept = partial(device.run, accept_step, slots, drafts, verify())
    calls = {"verify": verify, "accept": accept}
    if plan.proposer is not None and plan.drafter:
        drafting = Drafting(plan.proposer, plan.width)
        calls["draft"] = partial(device.run, draft_step, slots, num_drafts, drafting=drafting)
    return calls


def _milliseconds(call: Callable[[], Any]) -> float:
    return 1e3 * statistics.median(seconds_per_call(call, CALLS, ROUNDS))
