"""Rows in 8 bits for `fp8_product`, by one kernel where XLA would launch three."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.fp8_product.plan import EIGHT, Plan
from pallas_kernels.fp8_product.plan_8_by_8 import PlanOf8By8
from pallas_kernels.fp8_product.quantise import (
    BLOCK,
    E4M3,
    rounded,
    scales_of_pieces,
    scales_of_rows,
)
from pallas_kernels.jax_internals import pl, plgpu, store
from pallas_kernels.tiles import load, named, rows_in_lanes, strided

PIECES = rows_in_lanes(BLOCK)


def padded(plan: Plan, rows: Float[Array, "tokens inputs"]) -> Float[Array, "filled inputs"]:
    return jnp.pad(rows, ((0, plan.padded - plan.tokens), (0, 0)))


def rounded_rows(
    plan: PlanOf8By8,
    rows: Float[Array, "tokens inputs"],
    interpret: plgpu.InterpretGPUParams | None,
) -> tuple[Float[Array, "filled inputs"], Float[Array, "..."]]:
    """Rows in e4m3, and their scales: those of pieces tile by tile, [row tiles, pieces, at once],
    or one of each row."""
    body, grid, scales = in_pieces(plan) if plan.blocks else as_wholes(plan)
    return plgpu.kernel(
        named("round_rows", body),
        out_type=(
            jax.ShapeDtypeStruct((plan.padded, plan.inputs), E4M3),
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
    of_rows = scales_of_pieces(abs(wide).max(axis=1))
    store(numbers.at[rows, inputs], rounded(wide / lax.broadcast_in_dim(of_rows, wide.shape, [0])))
    within = pl.ds(lax.rem(first, plan.rows), EIGHT)
    store(scales.at[lax.div(first, plan.rows), piece, within], of_rows)


def as_wholes(plan: PlanOf8By8) -> Rounding:
    return round_one, {"row": plan.padded}, (plan.padded,)


def round_one(x, numbers, scales) -> None:
    """Rounds one row, all of which is in registers."""
    row = lax.axis_index("row")
    wide = load(x.at[row], strided(x.shape[1], x.dtype)).astype(jnp.float32)
    scale = scales_of_rows(abs(wide).max())
    store(numbers.at[row], rounded(wide / scale))
    scales[row] = scale
