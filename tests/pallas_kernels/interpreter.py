"""Runs a Mosaic GPU kernel on the CPU and says whether two of its threads raced."""

import contextlib
from collections.abc import Iterator

from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu

RACES = plgpu.InterpretGPUParams(detect_races=True)


@contextlib.contextmanager
def no_races() -> Iterator[plgpu.InterpretGPUParams]:
    interpret_pallas_call.reset_gpu_interpret_mode_state()
    yield RACES
    assert not interpret_pallas_call.get_races().races_found
