"""What describes a parameter besides its numbers: its logical axes and its initial values.

Parameters are plain arrays. Only a tree that `Module.init` made has them wrapped in the records of
this file, and `jaxspec.models.parameters` reads those.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import meta
from jax.typing import DTypeLike
from jaxtyping import Array, Key

from jaxspec.layers.axes import Axes, size_of

Initial = Callable[[Key[Array, ""], tuple[int, ...], DTypeLike], Array]
"""Makes initial values from a key, a shape and a dtype."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Described(meta.AxisMetadata[Any]):
    """A parameter with its logical axes and the function that makes its initial values."""

    value: Any
    axes: Axes = dataclasses.field(metadata={"static": True})
    initial: Initial = dataclasses.field(metadata={"static": True})

    def unbox(self) -> Any:
        return self.value

    def replace_boxed(self, val: Any) -> "Described":
        return dataclasses.replace(self, value=val)

    def add_axis(self, index: int, params: dict[Any, Any]) -> "Described":
        return self

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "Described":
        return self


def parameter(module: nn.Module, name: str, initial: Initial, axes: Axes, dtype: DTypeLike) -> Any:
    """Declares a parameter in a module's `setup`, and returns its array."""
    shape = tuple(map(size_of, axes))
    return module.param(name, lambda key: Described(initial(key, shape, dtype), axes, initial))


def ones(key: Key[Array, ""], shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    return jnp.ones(shape, dtype)


def zeros(key: Key[Array, ""], shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    return jnp.zeros(shape, dtype)


def small(key: Key[Array, ""], shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Small random values, as usual for embeddings."""
    return _normal(key, shape, jnp.dtype(dtype), 0.02)


def keeps_scale(key: Key[Array, ""], shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """A random matrix whose outputs are as large as its inputs on average."""
    return _normal(key, shape, jnp.dtype(dtype), shape[0] ** -0.5)


def counting(key: Key[Array, ""], shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """0, 1, 2, ...: ids, not weights."""
    return jnp.arange(*shape, dtype=dtype)


@partial(jax.jit, static_argnums=(1, 2, 3))
def _normal(key: Key[Array, ""], shape: tuple[int, ...], dtype: jnp.dtype, spread: float) -> Array:
    return jax.random.normal(key, shape, dtype) * jnp.asarray(spread, dtype)
