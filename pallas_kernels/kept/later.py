"""A call of a kernel that is lowered when the program is lowered, not when the call is traced.

In between, other processes can lower the kernel.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

Lowered = Callable[[], jax.export.Exported]
"""Waits for a lowered kernel and returns it."""

_call = Primitive("kernel_lowered_later")
_call.multiple_results = True


def lowered_later(lowered: Lowered, shapes: tuple[Any, ...], results: Any) -> Callable[..., Any]:
    """A function that calls the kernel, with arguments and results of these shapes."""
    taken, given = jax.tree.structure(shapes), jax.tree.structure(results)
    avals = tuple(ShapedArray(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(results))

    def run(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(lowered().call(*jax.tree.unflatten(taken, leaves)))

    def call(*arrays: Any) -> Any:
        results = _call.bind(*jax.tree.leaves(arrays), run=run, results=avals)
        return jax.tree.unflatten(given, results)

    return call


@_call.def_abstract_eval
def _(*arguments: Any, run: Any, results: tuple[ShapedArray, ...]) -> tuple[ShapedArray, ...]:
    del arguments, run
    return results


def _lower(context: Any, *operands: Any, run: Callable[..., Any], results: Any) -> Any:
    del results
    return mlir.lower_fun(run, multiple_results=True)(context, *operands)


mlir.register_lowering(_call, _lower)
