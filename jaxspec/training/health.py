"""Notices numbers that are not finite, so that a run neither goes on with them nor saves them."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jaxspec.errors import LoadError

REMEDY = (
    "nothing of it was saved: look at the target's weights and at the data of that step, or start "
    "again with a lower learning rate and another --out"
)


def check_metrics(step: int, values: Mapping[str, float]) -> None:
    """Raises a LoadError if a metric of the step is not finite, the loss for example."""
    wrong = [f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)]
    if wrong:
        raise LoadError(f"training stopped at step {step}: {', '.join(wrong)}; {REMEDY}")


def check_state(step: int, state: Any) -> None:
    """Raises a LoadError if a parameter or a moment of the optimizer is not finite.

    A finite loss is not enough: it is computed before the update of its step.
    """
    if not all_finite(state):
        raise LoadError(
            f"training stopped: after step {step} some parameters are not finite; {REMEDY}"
        )


@jax.jit
def all_finite(tree: Any) -> Bool[Array, ""]:
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in floats]))
