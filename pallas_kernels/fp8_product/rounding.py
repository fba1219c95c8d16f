"""Rows in 8 bits for `fp8_product`, by one kernel where XLA would launch three."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.fp8_product.plan import EIGHT, Plan
from pallas_kernels.fp8_product.plan_8_by_8 import PlanOf8By8
from pallas_kernels.fp8_product.quantise import BLOCK, E4M3
from pallas_kernels.jax_internals import pl, plgpu, store
from pallas_kernels.tiles import load, named, rows_in_lanes, strided

PIECES = rows_in_lanes(BLOCK)


def padded(plan: Plan, rows: Float[Array, "tokens inputs"]) -> Float[Array, "filled inputs"]:
    return jnp.pad(rows, ((0, plan.padded - plan.tokens), (0, 0)))


def rounded_rows(
    plan: PlanOf8By8,
    rows: Float[Array, "tokens inputs"],
    interpret: plgpu.InterpretGPUParams | None,
) -> tuple[Float[Array, "numbers filled inputs"], Float[Array, "..."]]:
    """Rows in e4m3, one number per input or two, and their scales: those of pieces tile by tile,
    [row tiles, pieces, at once], or one of each row."""
    body, grid, scales = in_pieces(plan) if plan.blocks else as_wholes(plan)
    return plgpu.kernel(
        named("round_rows", body),
        out_type=(
            jax.ShapeDtypeStruct((plan.numbers_per_input, plan.padded, plan.inputs), E4M3),
            jax.ShapeDtypeStruct(scales, jnp.float32),
        ),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=1,
        thread_name="warpgroup",
        interpret=interpret,
    )(padded(plan, rows))


Rounding = tuple[Any, dict[str, int], tuple[int, ...]]
"""Body and grid of a kernel, and the shape of its scales."""


def in_pieces(plan: PlanOf8By8) -> Rounding:
    grid = {"eight": plan.padded // EIGHT, "piece": plan.pieces}
    scales = plan.row_tiles, plan.pieces, plan.scales_at_once
    return functools.partial(round_eight, plan), grid, scales


def round_eight(plan: PlanOf8By8, x, numbers, scales) -> None:
    """Rounds one piece of eight rows. What pads the scales of a tile is not written, nor read."""
    first, piece = lax.axis_index("eight") * EIGHT, lax.axis_index("piece")
    rows, inputs = pl.ds(first, EIGHT), pl.ds(piece * BLOCK, BLOCK)
    wide = load(x.at[rows, inputs], PIECES).astype(jnp.float32)
    of_rows = plan.scales_of(abs(wide).max(axis=1))
    in_8_bits = plan.numbers(wide, lax.broadcast_in_dim(of_rows, wide.shape, [0]))
    for number, chunk in enumerate(in_8_bits):
        store(numbers.at[number, rows, inputs], chunk)
    within = pl.ds(lax.rem(first, plan.rows), EIGHT)
    store(scales.at[lax.div(first, plan.rows), piece, within], of_rows)


def as_wholes(plan: PlanOf8By8) -> Rounding:
    return functools.partial(round_one, plan), {"row": plan.padded}, (plan.padded,)


def round_one(plan: PlanOf8By8, x, numbers, scales) -> None:
    """Rounds one row, all of which is in registers. Every number has the scale beside it, because
    the bits of a single number cannot be worked on there."""
    row = lax.axis_index("row")
    wide = load(x.at[row], strided(x.shape[1], x.dtype)).astype(jnp.float32)
    of_numbers = plan.scales_of(lax.broadcast(abs(wide).max(), wide.shape))
    for number, chunk in enumerate(plan.numbers(wide, of_numbers)):
        store(numbers.at[number, row], chunk)
    scales[row] = of_numbers.max()
