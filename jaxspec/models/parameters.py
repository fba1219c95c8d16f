"""The parameter tree of a model: shapes, logical axes and fresh values."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Key

from jaxspec.layers.axes import Axes
from jaxspec.layers.parameter import Described
from jaxspec.layers.shards import AXIS, WHOLE

Params = dict[str, Any]


@runtime_checkable
class Touchable(Protocol):
    """A module whose `touch` uses every parameter once."""

    @property
    def init(self) -> Callable[..., Any]: ...

    @property
    def clone(self) -> Callable[..., Any]: ...

    def touch(self) -> None: ...


Place = Callable[[str, Any], Any]
"""Puts a parameter, given its path, where it belongs."""


def where_it_is(path: str, parameter: Any) -> Any:
    """Leaves a parameter on the device that made it."""
    del path
    return parameter


def random_params(model: Touchable, key: Key[Array, ""], place: Place = where_it_is) -> Params:
    """Fresh parameters, each as its module initialises it.

    They are made one by one, with one small program per shape: a single program for all of them
    would compile for minutes. Each is placed before the next one is made, so that no device needs
    room for all.
    """
    parameters = described_parameters(model)
    keys = dict(zip(parameters, jax.random.split(key, len(parameters))))
    leaves = {
        path: place(path, one.initial(keys[path], one.value.shape, one.value.dtype))
        for path, one in parameters.items()
    }
    return unflatten_dict(leaves, sep="/")


def parameter_shapes(model: Touchable) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every parameter by its path, for example `layers_0/mlp/down/kernel`."""
    return {path: one.value for path, one in described_parameters(model).items()}


def parameter_axes(model: Touchable) -> dict[str, Axes]:
    """Logical axes of every parameter by its path."""
    return {path: one.axes for path, one in described_parameters(model).items()}


def num_bytes(tree: Any) -> int:
    """Bytes of all arrays, or shapes of arrays, in a tree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def described_parameters(model: Touchable) -> dict[str, Described]:
    # `touch` runs every layer, but it is only traced here, so nothing is computed.
    plain = model.clone(implementation="xla")  # tracing kernels takes time
    make = lambda key: plain.init(key, method="touch")["params"]
    if (shards := getattr(model, "shards", WHOLE)).count > 1:  # sums over devices need an axis
        size = shards.count
        make = jax.vmap(make, in_axes=None, out_axes=None, axis_name=AXIS, axis_size=size)
    described: Any = flatten_dict(jax.eval_shape(make, jax.random.key(0)), sep="/")
    return described
