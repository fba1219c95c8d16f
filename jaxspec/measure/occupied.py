"""An engine's slots in the middle of a generation, to time steps by hand."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import numpy as np

from jaxspec.engine.engine import Engine
from jaxspec.engine.plan.plan import Plan
from jaxspec.engine.step.device import Device
from jaxspec.engine.step.state import EngineState


@contextmanager
def occupied_device(engine: Engine, batch: int, context: int) -> Iterator[Device]:
    """The device of an engine without requests, whose first `batch` slots are `occupied`."""
    with engine.borrow_device() as device:
        assert device.state is not None, "the device's state was lost"
        device.state = occupied(device.state, batch, context, engine.plan)
        yield device


def occupied(state: EngineState, batch: int, context: int, plan: Plan) -> EngineState:
    """The state as if each of the first `batch` slots had committed `context` positions, and had
    budget for as many as fit. If there are fewer pages than that, slots share them."""
    pages = np.zeros(state.page_table.shape, np.int32)
    pages[:batch] = 1 + np.arange(pages[:batch].size).reshape(batch, -1) % (plan.num_pages - 1)
    in_use = (np.arange(len(pages)) < batch).astype(np.int32)
    page_table, lengths, limits = jax.device_put(
        (pages, in_use * np.int32(context), in_use * np.int32(plan.max_model_len))
    )
    return dataclasses.replace(state, page_table=page_table, lengths=lengths, limits=limits)
