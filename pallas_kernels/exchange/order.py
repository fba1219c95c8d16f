"""How parts are added up, in kernels and in references."""

import functools
import operator
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp


def sum_in_order(parts: Iterable[Any]) -> Any:
    """The sum in float32, in the order of the parts."""
    return functools.reduce(operator.add, [part.astype(jnp.float32) for part in parts])
