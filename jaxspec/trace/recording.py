"""Records some steps of an engine, with the files that are needed to read the trace later.

DIR/plugins/profile/.../*.xplane.pb    the trace (TensorBoard, xprof, jax.profiler.ProfileData)
DIR/run.json                           engine, environment and flags; bytes for the floor
DIR/programs.json                      scope of every instruction of the programs that ran
"""

import dataclasses
import os
import shutil
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from jaxspec.console.files import make_folder, write_json
from jaxspec.engine.engine import Engine
from jaxspec.engine.step.observer import Step, StepObserver
from jaxspec.measure.environment import environment, kernels
from jaxspec.measure.floor import copy_bytes_per_second, step_bytes
from jaxspec.trace.programs import hlo_of, op_names_of

ProgramRun = tuple[Step, tuple[Any, ...], dict[str, Any]]
"""A step, the shapes of its inputs, and its static arguments."""


class Recorder(StepObserver):
    """Records `steps` steps of an engine after the first `skip`."""

    def __init__(self, engine: Engine, folder: Path, skip: int, steps: int):
        self.engine, self.folder = engine, folder
        self.first, self.last = skip, skip + steps - 1
        self.number = 0
        self.annotation: jax.profiler.StepTraceAnnotation | None = None
        """Marks the step in the trace; None unless a step is being recorded."""
        self.recording = False
        self.batches: list[int] = []
        """For every recorded step, how many requests were running."""
        self.ran: dict[Hashable, ProgramRun] = {}
        """The programs that ran in recorded steps, each once."""

    def step_begins(self, running: int) -> None:
        if self.number == self.first:
            self.start()
        if self.recording:
            self.batches.append(running)
            self.annotation = jax.profiler.StepTraceAnnotation("step", step_num=self.number)
            self.annotation.__enter__()

    def program(self, step: Step, inputs: tuple[Any, ...], static: dict[str, Any]) -> None:
        if self.recording:
            shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), inputs)
            self.ran[f"{step.__name__} {shapes} {static}"] = (step, shapes, static)

    def step_ends(self) -> None:
        if self.annotation is not None:
            self.annotation.__exit__(None, None, None)
            self.annotation = None
        if self.number == self.last:
            self.stop()
        self.number += 1

    def start(self) -> None:
        self.engine.wait()
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        jax.profiler.start_trace(self.folder, profiler_options=options)
        self.recording = True

    def stop(self) -> None:
        if self.recording:
            self.engine.wait()
            jax.profiler.stop_trace()
            self.recording = False


@contextmanager
def recording(
    engine: Engine, folder: str, skip: int, steps: int, about: dict[str, Any]
) -> Iterator[Recorder]:
    """Records the engine inside the `with` block; `about` is added to run.json."""
    place = make_folder(folder)
    shutil.rmtree(place / "plugins", ignore_errors=True)  # left by an earlier run in this folder
    recorder = Recorder(engine, place, skip, steps)
    with engine.observe(recorder):
        try:
            yield recorder
        finally:
            recorder.stop()
    write_json(place / "run.json", about | _about(engine, recorder))
    compiled = (
        engine.trace(step, *inputs, **static).lower().compile()
        for step, inputs, static in recorder.ran.values()
    )
    write_json(place / "programs.json", [op_names_of(hlo_of(one)) for one in compiled])


def _about(engine: Engine, recorder: Recorder) -> dict[str, Any]:
    flags = os.environ.get("XLA_FLAGS", "").split()
    return {
        "environment": environment(),
        "kernels": kernels(engine),
        "mode": "readable" if "--xla_gpu_enable_command_buffer=" in flags else "timing",
        "method": engine.plan.method,
        "driver": engine.plan.driver,
        "synthetic": engine.options.synthetic_acceptance is not None,
        "steps_skipped": recorder.first,
        "steps_recorded": len(recorder.batches),
        "requests_of_steps": recorder.batches,
        "bytes": dataclasses.asdict(step_bytes(engine.models, engine.params)),
        "copy_bytes_per_second": copy_bytes_per_second(),
    }
