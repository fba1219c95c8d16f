"""Memory of the layer that a thread block works on, one of several whose arrays have equal shapes.

A kernel cannot choose one of its arrays by a number. It can choose among their addresses, and load
from and store to the chosen one. Code for every layer, of which one is run, would do the same, but
jax takes minutes to lower it.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels import jax_internals as internals
from pallas_kernels.jax_internals import inline_mgpu, pl, plgpu
from pallas_kernels.tiles import load

REF, SCALAR = plgpu.RefType(), plgpu.Layout.WG_SPLAT


@dataclasses.dataclass(frozen=True)
class Place:
    """Some rows and columns of a matrix in an array of matrices."""

    matrix: tuple
    """Its index."""
    first_row: Any
    rows: int | None
    """None for a single row without the axis of rows."""
    first_column: Any
    columns: int

    @property
    def index(self) -> tuple:
        rows = self.first_row if self.rows is None else pl.ds(self.first_row, self.rows)
        return *self.matrix, rows, pl.ds(self.first_column, self.columns)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.columns,) if self.rows is None else (self.rows, self.columns)

    def offset(self, shape: tuple[int, ...]) -> Any:
        """Numbers before the place, in an array of this shape."""
        strides = [math.prod(shape[i:]) for i in range(1, len(shape) + 1)]
        first = *self.matrix, self.first_row, self.first_column
        return jnp.int32(sum(jnp.int32(i) * stride for i, stride in zip(first, strides)))


@dataclasses.dataclass(frozen=True)
class OfLayers:
    """The same array of every layer."""

    refs: Sequence[Any]
    interpreted: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return self.refs[0].shape

    def load(self, place: Place, layout) -> Any:
        if self.plainly:
            return self.of_branches(lambda ref: load(ref.at[place.index], layout))
        found = plgpu.ShapeDtypeStruct(place.shape, self.refs[0].dtype, layout=layout)

        @inline_mgpu(arg_types=((REF,) * len(self.refs), SCALAR, SCALAR), return_type=found)
        def loaded(_, refs, layer, offset):
            return internals.load_at(self.memory(refs, layer, offset, place), layout)

        return loaded(tuple(self.refs), lax.axis_index("layer"), place.offset(self.shape))

    def store(self, place: Place, value, layout) -> None:
        if self.plainly:
            self.of_branches(lambda ref: internals.store(ref.at[place.index], value))
            return

        @inline_mgpu(arg_types=((REF,) * len(self.refs), SCALAR, SCALAR, layout))
        def store(_, refs, layer, offset, value) -> None:
            internals.store_at(self.memory(refs, layer, offset, place), value)

        store(tuple(self.refs), lax.axis_index("layer"), place.offset(self.shape), value)

    @property
    def plainly(self) -> bool:
        """Whether memory is not chosen by its address."""
        return self.interpreted or len(self.refs) == 1

    def of_branches(self, compute) -> Any:
        if len(self.refs) == 1:
            return compute(self.refs[0])
        branches = [lambda ref=ref: compute(ref) for ref in self.refs]
        return lax.switch(lax.axis_index("layer"), branches)

    def memory(self, refs, layer, offset, place: Place) -> Any:
        address = internals.address_of_one(refs, internals.number_of(layer))
        strides = (self.shape[-1], 1)[-len(place.shape) :]
        begin = internals.number_of(offset)
        return internals.memory_at(address, begin, place.shape, strides, refs[0])
