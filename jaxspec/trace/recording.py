"""Recording some steps of an engine, with what is needed to read the trace later.

DIR/plugins/profile/.../*.xplane.pb    the trace (TensorBoard, xprof, jax.profiler.ProfileData)
DIR/run.json                           what ran, where, with which flags; bytes for the floor
DIR/programs.json                      scope of every instruction of the programs that ran
"""

import dataclasses
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from jaxspec.console.files import make_folder, write_json
from jaxspec.engine.engine import Engine
from jaxspec.engine.schedule.loop import Loop
from jaxspec.measure.environment import environment
from jaxspec.measure.floor import copy_bytes_per_second, step_bytes
from jaxspec.trace.programs import hlo_of, op_names_of


class Recorder:
    """Takes the place of a loop's driver and records `steps` of its calls after `skip`."""

    def __init__(self, loop: Loop, folder: Path, skip: int, steps: int):
        self.loop, self.folder = loop, folder
        self.first, self.last = skip, skip + steps - 1
        self.driver, self.run = loop.driver, loop.device.run
        self.number = 0
        self.recording = False
        self.batches: list[int] = []
        """Running requests of every recorded step."""
        self.programs: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {}

    def drive(self, loop: Loop) -> None:
        if self.number == self.first:
            self.start()
        if not self.recording:
            self.driver(loop)
        else:
            self.batches.append(len(loop.running))
            with jax.profiler.StepTraceAnnotation("step", step_num=self.number):
                self.driver(loop)
        if self.number == self.last:
            self.stop()
        self.number += 1

    def run_and_keep(self, step: str, *inputs: Any, **static: Any) -> Any:
        """Runs a program and keeps what is needed to compile it again."""
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), inputs)
        self.programs[f"{step} {shapes} {static}"] = (step, shapes, static)
        return self.run(step, *inputs, **static)

    def start(self) -> None:
        jax.block_until_ready(self.loop.device.state)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        self.loop.device.run = self.run_and_keep
        jax.profiler.start_trace(self.folder, profiler_options=options)
        self.recording = True

    def stop(self) -> None:
        if self.recording:
            jax.block_until_ready(self.loop.device.state)
            jax.profiler.stop_trace()
            self.loop.device.run = self.run
            self.recording = False


@contextmanager
def recording(
    engine: Engine, folder: str, skip: int, steps: int, about: dict[str, Any]
) -> Iterator[Recorder]:
    """Records what the engine does inside; `about` goes into run.json."""
    place = make_folder(folder)
    shutil.rmtree(place / "plugins", ignore_errors=True)  # of an earlier run into this folder
    recorder = Recorder(engine.loop, place, skip, steps)
    engine.loop.driver = recorder.drive
    try:
        yield recorder
    finally:
        recorder.stop()
        engine.loop.driver = recorder.driver
    write_json(place / "run.json", about | _about(engine, recorder))
    lowered = (
        engine.loop.device.lower(step, *inputs, **static)
        for step, inputs, static in recorder.programs.values()
    )
    write_json(place / "programs.json", [op_names_of(hlo_of(one.compile())) for one in lowered])


def _about(engine: Engine, recorder: Recorder) -> dict[str, Any]:
    device, plan = engine.loop.device, engine.loop.plan
    flags = os.environ.get("XLA_FLAGS", "").split()
    return {
        "environment": environment(),
        "mode": "readable" if "--xla_gpu_enable_command_buffer=" in flags else "timing",
        "method": plan.method,
        "driver": plan.driver,
        "synthetic": device.models.synthetic,
        "steps_skipped": recorder.first,
        "steps_recorded": len(recorder.batches),
        "requests_of_steps": recorder.batches,
        "bytes": dataclasses.asdict(step_bytes(device.models, device.params)),
        "copy_bytes_per_second": copy_bytes_per_second(),
    }
