"""A trace of some steps of an engine, with what is needed to read it later.

DIR/plugins/profile/.../*.xplane.pb    the trace (TensorBoard, xprof, jax.profiler.ProfileData)
DIR/run.json                           what ran, where, with which flags; bytes for the floor
DIR/programs.json                      scope of every instruction of the programs that ran
"""

import dataclasses
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from jaxspec.console.files import make_folder, write_json
from jaxspec.engine.engine import Engine
from jaxspec.engine.schedule.loop import Loop
from jaxspec.engine.setup.warmup import every_program
from jaxspec.measure.environment import environment
from jaxspec.measure.floor import copy_bytes_per_second, step_bytes

INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = .*metadata=\{[^}]*op_name=\"([^\"]*)\"")


class Recorder:
    """Stands in for a loop's driver and records `steps` of its calls after `skip`."""

    def __init__(self, loop: Loop, folder: Path, skip: int, steps: int):
        self.loop, self.folder = loop, folder
        self.first, self.last = skip, skip + steps - 1
        self.driver, self.run = loop.driver, loop.device.run
        self.number = 0
        self.recording = False
        self.recorded: list[int] = []
        self.programs: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {}

    def drive(self, loop: Loop) -> None:
        if self.number == self.first:
            self.start()
        if not self.recording:
            self.driver(loop)
        else:
            self.recorded.append(len(loop.running))
            with jax.profiler.StepTraceAnnotation("step", step_num=self.number):
                self.driver(loop)
        if self.number == self.last:
            self.stop()
        self.number += 1

    def noting_programs(self, step: str, *inputs: Any, **static: Any) -> Any:
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), inputs)
        self.programs[f"{step} {shapes} {static}"] = (step, shapes, static)
        return self.run(step, *inputs, **static)

    def start(self) -> None:
        jax.block_until_ready(self.loop.device.state)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        self.loop.device.run = self.noting_programs
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
    device = engine.loop.device
    flags = os.environ.get("XLA_FLAGS", "")
    write_json(
        place / "run.json",
        {
            **about,
            "environment": environment(),
            "mode": "readable" if "--xla_gpu_enable_command_buffer=" in flags.split() else "timing",
            "method": engine.loop.plan.method,
            "driver": engine.loop.plan.driver,
            "synthetic": device.models.synthetic,
            "steps_skipped": skip,
            "steps_recorded": len(recorder.recorded),
            "rows_of_steps": recorder.recorded,
            "bytes": dataclasses.asdict(step_bytes(device.models, device.params)),
            "copy_bytes_per_second": copy_bytes_per_second(),
        },
    )
    texts = {
        name: device.lower(step, *inputs, **static).compile().as_text()
        for name, (step, inputs, static) in recorder.programs.items()
    }
    write_json(place / "programs.json", [scopes(text) for text in texts.values()])


def scopes(hlo: str) -> dict[str, Any]:
    """Of every instruction of a compiled program its op_name, the path of scopes it came from."""
    found = (INSTRUCTION.match(line) for line in hlo.splitlines())
    module = hlo.split(None, 2)[1].rstrip(",")
    return {"module": module, "op_names": {m.group(1): m.group(2) for m in found if m}}


def dump_programs(engine: Engine, folder: str, draws: bool) -> list[dict[str, Any]]:
    """HLO text of every step program that the engine can need, and what memory each takes."""
    place, rows = make_folder(folder), []
    device = engine.loop.device
    for number, (step, inputs, static) in enumerate(every_program(device, engine.loop.plan, draws)):
        compiled = device.lower(step, *inputs, **static).compile()
        name = f"{number:02d}-{step}"
        (place / f"{name}.hlo.txt").write_text(compiled.as_text())
        memory = compiled.memory_analysis()
        rows.append(
            {
                "program": name,
                "inputs": [str(leaf.shape) for leaf in jax.tree.leaves(inputs)],
                "temporary_bytes": memory.temp_size_in_bytes,
                "argument_bytes": memory.argument_size_in_bytes,
                "output_bytes": memory.output_size_in_bytes,
                "aliased_bytes": memory.alias_size_in_bytes,
                "code_bytes": memory.generated_code_size_in_bytes,
            }
        )
    write_json(place / "memory.json", rows)
    return rows
