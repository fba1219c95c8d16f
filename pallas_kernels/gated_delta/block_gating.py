"""The end of `block_read`: outputs normed head by head, and multiplied by SiLU of their gates.

A thread has one column of all rows, so the sum over a row goes through shared memory.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels import jax_internals as internals
from pallas_kernels.gated_delta.block_reading import BlockOfRows, by_row, rounded_silu
from pallas_kernels.gated_delta.checks import BLOCK_ROWS, DIM
from pallas_kernels.gated_delta.rows import ROW_LAYOUT
from pallas_kernels.jax_internals import pl
from pallas_kernels.tiles import load, rows_in_lanes


class Gating(NamedTuple):
    """What the outputs are gated with, in registers. It is loaded long before it is used."""

    gates: Any
    scale: Any

    @classmethod
    def of(cls, block: BlockOfRows, scale) -> "Gating":
        gates = load(block.made.inputs.at[block.of_gates], ROW_LAYOUT)
        return cls(gates, load(scale, ROW_LAYOUT.reduce(0)))

    def gated(self, block: BlockOfRows, outputs, eps: float) -> Any:
        """What the layer multiplies by its output matrix. `outputs` are rounded first, as they are
        if another kernel gates them."""
        dtype, shape = block.made.inputs.dtype, outputs.shape
        outputs = outputs.astype(dtype).astype(jnp.float32)
        inverse = by_row(inverse_lengths(block, outputs, eps), shape)
        scales = lax.broadcast_in_dim(self.scale.astype(jnp.float32), shape, [1])
        gates = rounded_silu(self.gates.astype(jnp.float32), block.interpreted)
        return outputs * inverse * scales * gates


def inverse_lengths(block: BlockOfRows, outputs, eps: float) -> Any:
    """One over the root mean square of each row, in the layout of rows. The memory of products and
    squares is free by now."""
    width, products = block.width, block.scratch["products"]
    internals.store(products.at[pl.ds(0, width)], outputs)
    numbers = load(products.at[pl.ds(0, BLOCK_ROWS)], rows_in_lanes(DIM))
    mean = (numbers * numbers).sum(axis=1) * (1 / DIM)
    inverses = block.scratch["squares"].at[pl.ds(0, BLOCK_ROWS)]
    internals.store(inverses, lax.rsqrt(mean + eps))
    return load(block.scratch["squares"].at[pl.ds(0, width)], ROW_LAYOUT.reduce(1))
