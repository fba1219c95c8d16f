"""Makes all slots decode, which is the state in which steps are measured."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from jaxspec.engine.engine import Engine
from jaxspec.engine.event_stream import StreamEvent
from jaxspec.engine.step.device import Device
from jaxspec.engine.step.state import occupied


@contextmanager
def occupied_device(engine: Engine, batch: int, context: int) -> Iterator[Device]:
    """Yields the device of an engine without requests, with `batch` slots in the middle of a
    generation."""
    with engine.borrow_device() as device:
        assert device.state is not None, "the device has no state"
        device.state = occupied(device.state, batch, context, engine.max_model_len)
        yield device


def random_prompts(engine: Engine, count: int, length: int) -> list[list[int]]:
    """Random prompts, which are the same in every call."""
    random, vocab_size = np.random.default_rng(0), engine.models.target.vocab_size
    return random.integers(0, vocab_size, (count, length)).tolist()


def step_until_all_decode(engine: Engine, ids: Sequence[int]) -> list[StreamEvent]:
    """Runs steps until each of these requests has its first token, and returns the events."""
    events = []
    while engine.num_decoding < len(ids):
        new = engine.step(ids)
        ended = [event.output for event in new if event.output is not None]
        assert not ended, f"ended too early: {ended[0].error or ended[0].finish_reason}"
        events += new
    return events
