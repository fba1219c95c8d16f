"""The steps as compiled programs, and the state that they update."""

import dataclasses
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int

from jaxspec.acceptance import accept
from jaxspec.engine.step import steps
from jaxspec.engine.step.io import Models, Verified
from jaxspec.engine.step.observer import Step, StepObserver
from jaxspec.engine.step.state import EngineState
from jaxspec.proposers.device import Drafts, Params

STATIC: dict[Step, tuple[str, ...]] = {
    steps.admit_step: (),
    steps.prefill_step: ("draws",),
    steps.decode_step: ("drafting", "draws"),
    steps.draft_step: ("drafting",),
    steps.replace_step: (),
    steps.verify_step: ("draws",),
    steps.accept_step: (),
    steps.commit_step: (),
}
"""Every step, with its static arguments, which choose the program."""

# Compiled once per shape for all engines of a process: the models are static and hashable. The
# state is donated, so the caller must replace its own by the returned one.
COMPILED = {
    step: jax.jit(step, static_argnums=0, static_argnames=static, donate_argnums=2)
    for step, static in STATIC.items()
}


@dataclasses.dataclass(frozen=True)
class Program:
    """One program that an engine may run, traced."""

    step: Step
    inputs: tuple[Any, ...]
    """Shapes of the inputs besides models, parameters and state."""
    static: dict[str, Any]
    traced: jax.stages.Traced

    @property
    def name(self) -> str:
        return self.step.__name__


class Device:
    """Models, parameters and the one live state. Every run replaces the state."""

    def __init__(self, models: Models, params: Params, state: EngineState):
        self.models = models
        self.params = params
        self.state = state
        self.observers: list[StepObserver] = []
        self.integers = lru_cache(maxsize=256)(_upload)
        """Uploads a tuple of integers, padded to a shape. Recent uploads are cached."""

    def run(self, step: Step, *inputs: Any, **static: Any) -> Any:
        """Runs a step, replaces the state, and returns the step's other results."""
        for observer in tuple(self.observers):
            observer.program(step, inputs, static)
        self.state, output = COMPILED[step](self.models, self.params, self.state, *inputs, **static)
        return output

    def trace(self, step: Step, *inputs: Any, **static: Any) -> jax.stages.Traced:
        """Traces the program of a step without running it. Lowered and compiled, it is the program
        that `run` would run."""
        return COMPILED[step].trace(self.models, self.params, self.state, *inputs, **static)

    def accept_on_host(self, drafts: Drafts, verified: Verified) -> Int[Array, " batch"]:
        """Number of accepted drafts, computed on the host by the same rule as on the device."""
        fetched = map(np.asarray, (drafts.tokens, verified.tokens, verified.num_drafts))
        return jax.device_put(accept(*fetched))

    def discard_state(self) -> None:
        """Frees the state's arrays; programs can still be traced for their shapes."""
        for leaf in jax.tree.leaves(self.state):
            leaf.delete()


class Tracer:
    """Stands in for a device: traces the programs that would run, each once, and runs none."""

    def __init__(self, device: Device):
        self.device = device
        self.programs: dict[Hashable, Program] = {}

    def run(self, step: Step, *inputs: Any, **static: Any) -> Any:
        leaves, structure = jax.tree.flatten(inputs)
        shapes = tuple((leaf.shape, np.dtype(leaf.dtype)) for leaf in leaves)
        key = step, structure, shapes, tuple(static.items())
        if key not in self.programs:
            traced = self.device.trace(step, *inputs, **static)
            self.programs[key] = Program(step, inputs, static, traced)
        _, output = self.programs[key].traced.out_info
        return output

    def accept_on_host(self, drafts: Drafts, verified: Verified) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(verified.num_drafts.shape, np.int32)


def _upload(values: Sequence[int], shape: tuple[int, ...], padding: int) -> Int[Array, "..."]:
    array = np.full(shape, padding, np.int32)
    array.flat[: len(values)] = values
    return jax.device_put(array)
