"""Observers that spoil a device's states: all of them, or with NaN what no step may read."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache.states import States
from jaxspec.engine.step.observer import StepObserver


class Distrust(StepObserver):
    """Makes the engine rebuild its state in the step `at`, as after a fault."""

    def __init__(self, engine, at: int):
        self.engine, self.left = engine, at

    def step_begins(self, running):
        self.left -= 1
        if self.left == 0:
            self.engine.loop.trusted = False


class Poisoner(StepObserver):
    """Writes NaN into the states of slots without a request or with one that is about to begin, and
    into empty rows for saved states."""

    def __init__(self, engine):
        self.engine, self.count = engine, 0

    def step_begins(self, running):
        loop = self.engine.loop
        state = loop.device.state
        idle = np.asarray(state.lengths) == 0
        idle[[slot for slot in range(len(idle)) if slot not in self._taken()]] = True
        self.count += int(idle.sum())
        idle = np.concatenate([idle, self._unsaved()])
        loop.device.state = dataclasses.replace(
            state,
            cache=jax.tree.map(
                lambda layer: self._poisoned(layer, idle),
                state.cache,
                is_leaf=lambda part: isinstance(part, States),
            ),
        )

    def _unsaved(self) -> np.ndarray:
        states = self.engine.loop.ledger.book.index.states
        unsaved = np.zeros(self.engine.plan.num_snapshots, bool)
        unsaved[[] if states is None else [*states.free]] = True
        return unsaved

    def _taken(self) -> set[int]:
        return {request.slot for request in self.engine.loop.ledger.running.values()}

    @staticmethod
    def _poisoned(layer, idle):
        if not isinstance(layer, States):
            return layer
        spoil = lambda x: jnp.where(idle.reshape(-1, *[1] * (x.ndim - 1)), jnp.nan, x)
        return States(spoil(layer.matrices), spoil(layer.tails))
