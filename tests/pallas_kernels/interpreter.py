"""Runs a Mosaic GPU kernel on the CPU and says whether two of its threads raced."""

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax._src import callback
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call, shared_memory
from jax.experimental.pallas import mosaic_gpu as plgpu

RACES = plgpu.InterpretGPUParams(detect_races=True)


@contextlib.contextmanager
def no_races() -> Iterator[plgpu.InterpretGPUParams]:
    interpret_pallas_call.reset_gpu_interpret_mode_state()
    with callbacks_of_numpy():
        yield RACES
        jax.effects_barrier()  # a kernel that still runs may still race
    assert not interpret_pallas_call.get_races().races_found, "two threads raced"


@contextlib.contextmanager
def callbacks_of_numpy() -> Iterator[None]:
    """The interpreter calls Python for every instruction. jax would put each argument on the device
    for that, where the interpreter takes it from again, which is half of its time."""

    def copied(arguments: Any, device: Any) -> Any:
        return tuple(map(np.array, arguments))

    def to_int(x: Any) -> Any:
        return x.item() if isinstance(x, np.ndarray) else of_interpreter(x)

    of_interpreter = shared_memory._to_int
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(callback, "api", types.SimpleNamespace(device_put=copied))
        patch.setattr(shared_memory, "_to_int", to_int)
        yield
