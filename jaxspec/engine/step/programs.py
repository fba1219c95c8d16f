"""The steps as compiled programs, and the state they act on."""

from typing import Any

import jax

from jaxspec.engine.step import decode as whole
from jaxspec.engine.step import propose, target
from jaxspec.engine.step.io import Models, Params
from jaxspec.engine.step.state import EngineState

STATIC = {
    whole.seat_step: (),
    target.prefill_step: ("draws",),
    propose.draft_step: ("width",),
    propose.drawn_draft_step: ("width",),
    propose.replace_step: (),
    propose.lookup_step: ("lookup",),
    target.verify_step: ("draws",),
    target.accept_step: (),
    target.commit_step: (),
    whole.plain_step: ("draws",),
    whole.spec_step: ("draws", "width"),
    whole.drawn_spec_step: ("width",),
    whole.lookup_spec_step: ("lookup", "draws"),
}
"""Every step, and which of its arguments choose the program."""

# Compiled once per shape for all engines of a process: the models are static and hashable. The
# state is donated; whoever holds it must take the returned one in its place.
COMPILED = {
    step.__name__: jax.jit(step, static_argnums=0, static_argnames=static, donate_argnums=2)
    for step, static in STATIC.items()
}


class Device:
    """Models, parameters and the one live state. Every run replaces the state."""

    def __init__(self, models: Models, params: Params, state: EngineState):
        self.models = models
        self.params = params
        self.state: EngineState | None = state

    def run(self, step: str, *inputs: Any, **static: Any) -> Any:
        """Runs a step on the state and returns what it gives besides the next state."""
        result = COMPILED[step](self.models, self.params, self.state, *inputs, **static)
        if isinstance(result, EngineState):
            self.state = result
            return None
        self.state, output = result
        return output

    def lower(self, step: str, *inputs: Any, **static: Any) -> jax.stages.Lowered:
        """The program of a step, not run; compiling it is what the next run would do."""
        return COMPILED[step].lower(self.models, self.params, self.state, *inputs, **static)

    def lost_its_state(self) -> bool:
        """Whether a program died after it had been given the state to overwrite."""
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state)):
            return True
        try:  # a program that was launched well may have died since
            jax.block_until_ready(self.state)
        except Exception:
            return True
        return False
