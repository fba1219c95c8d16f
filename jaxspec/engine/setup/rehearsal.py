"""Runs every program before requests do, because a program's first runs on a GPU take longer than
later ones: its kernels are loaded, and then its CUDA graph is recorded."""

from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int

from jaxspec.engine.plan.plan import Plan
from jaxspec.engine.setup.warmup import every_run
from jaxspec.engine.step.device import Device
from jaxspec.engine.step.io import Verified
from jaxspec.engine.step.observer import Step
from jaxspec.proposers.device import Drafts

RUNS = 2
"""XLA records the CUDA graph of a program when it runs for the second time."""


def first_runs_are_slow() -> bool:
    return jax.default_backend() != "cpu"


def rehearse(device: Device, plan: Plan, draws: bool, scores: bool) -> None:
    """Runs every program with zeros for inputs: an empty slot, and pages that nothing else uses.
    Leaves the contents of slot 0 undefined."""
    stand_in = _WithZeros(device)
    for run in every_run(plan, draws, only_needed=True, scores=scores):
        run(stand_in)
    jax.block_until_ready(device.state)


class _WithZeros:
    """Takes the place of a device that is given the shapes of inputs."""

    def __init__(self, device: Device):
        self.device = device

    def run(self, step: Step, *inputs: Any, **static: Any) -> Any:
        zeros, output = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), inputs), None
        for _ in range(RUNS):
            output = self.device.run(step, *zeros, **static)
        return output

    def accept_on_host(self, drafts: Drafts, verified: Verified) -> Int[Array, " batch"]:
        return self.device.accept_on_host(drafts, verified)
