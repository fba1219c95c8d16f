"""The product of one chunk of 8-bit weights with rows (tokens) in shared memory.

A chunk is UNIT outputs times BLOCK inputs, [outputs, inputs] as the matrix is stored, and lies in
one block, so that a block's scale belongs to all of it. The weights are the left side of the matrix
instruction: they are widened in registers, exactly, and the sums are [outputs, rows].
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.fp8_product.quantise import BLOCK
from pallas_kernels.fp8_product.widen import ACC, UNIT, widen
from pallas_kernels.jax_internals import plgpu
from pallas_kernels.tiles import Turn, load, times_each

PER_OUTPUT = ACC.reduce(1)
SMALLEST_SCALE = 2.0**-80
"""Scales of a smaller magnitude count as this one, because sums are divided by scales. Numbers that
small vanish next to those of other blocks."""


class Sums(NamedTuple):
    """The sums of scaled products so far, as multiples of the last chunk's scale.

    Before each chunk they become multiples of its scale. So the matrix instruction can add the
    chunk's unscaled products to them, and no registers are needed for products of a chunk alone.
    """

    multiples: Any
    """[outputs, rows], float32"""
    unit: Any
    """The last scale; 1 at first, and always if scales belong to outputs."""

    @property
    def totals(self):
        return self.multiples * self.unit


def no_sums(rows: int) -> Sums:
    return Sums(no_totals(rows), jnp.float32(1))


def no_totals(rows: int):
    return plgpu.layout_cast(jnp.zeros((UNIT, rows), jnp.float32), ACC)


def add_product(
    sums: Sums, weights, rows, scale, interpreted: bool, turn: Turn | None = None
) -> Sums:
    """The sums plus the scaled product of a chunk with rows [rows, inputs].

    Without a scale the chunk's products are added as they are. The chunk is multiplied in two
    pieces, so that only one is in registers at a time (both, if warpgroups take turns).
    """
    multiples, unit = sums
    if scale is not None:
        scale = jnp.where(abs(scale) < SMALLEST_SCALE, SMALLEST_SCALE, scale)
        multiples, unit = multiples * (unit / scale), scale
    pieces = []
    for first in range(0, BLOCK, PIECE):
        inputs = slice(first, first + PIECE)
        left = functools.partial(widened, weights, inputs, rows.dtype, interpreted)
        pieces.append((left, rows.at[:, inputs].T))
    return Sums(times_each(multiples, pieces, interpreted, turn), unit)


PIECE = 64
"""Inputs of a chunk that are multiplied at a time: one swizzled tile of rows."""


def widened(weights, inputs: slice, dtype, interpreted: bool):
    """These inputs of a chunk in registers, from e4m3 in shared memory."""
    if interpreted:
        return load(weights, ACC)[:, inputs].astype(dtype)
    return widen(weights, inputs.start, inputs.stop - inputs.start)


def times_outputs(sums, scales):
    """Sums [outputs, rows] times a scale per output, from memory."""
    of_outputs = load(scales, PER_OUTPUT)
    return sums * lax.broadcast_in_dim(of_outputs, sums.shape, [0])
