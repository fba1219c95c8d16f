"""Rows in 8 bits for `fp8_product`, with scales of their pieces or of whole rows."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.fp8_product.plan import EIGHT, Plan
from pallas_kernels.fp8_product.plan_8_by_8 import PlanOf8By8
from pallas_kernels.fp8_product.quantise import BLOCK, E4M3, quantised_pieces, rounded, scales_of
from pallas_kernels.jax_internals import pl, plgpu, store
from pallas_kernels.tiles import load, named, rows_in_lanes

EIGHT_ROWS = rows_in_lanes(BLOCK)


def padded(plan: Plan, rows: Float[Array, "tokens inputs"]) -> Float[Array, "padded inputs"]:
    return jnp.pad(rows, ((0, plan.padded - plan.tokens), (0, 0)))


def rounded_rows(
    plan: PlanOf8By8,
    rows: Float[Array, "tokens inputs"],
    interpret: plgpu.InterpretGPUParams | None,
) -> tuple[Float[Array, "padded inputs"], Float[Array, "row_tiles pieces at_once"]]:
    """Rows in e4m3, and the scales of their pieces tile by tile. XLA would write them in three
    kernels."""
    padded_rows = padded(plan, rows)
    scales = (plan.row_tiles, plan.pieces, plan.scales_at_once)
    return plgpu.kernel(
        named("round_rows", functools.partial(round_eight, plan)),
        out_type=(
            jax.ShapeDtypeStruct(padded_rows.shape, E4M3),
            jax.ShapeDtypeStruct(scales, jnp.float32),
        ),
        grid=(plan.padded // EIGHT, plan.pieces),
        grid_names=("eight", "piece"),
        num_threads=1,
        thread_name="warpgroup",
        interpret=interpret,
    )(padded_rows)


def round_eight(plan: PlanOf8By8, x, numbers, scales) -> None:
    """Rounds one piece of eight rows. What pads the scales of a tile is not written, nor read."""
    first, piece = lax.axis_index("eight") * EIGHT, lax.axis_index("piece")
    inputs = pl.ds(piece * BLOCK, BLOCK)
    wide = load(x.at[pl.ds(first, EIGHT), inputs], EIGHT_ROWS).astype(jnp.float32)
    of_rows = scales_of(abs(wide).max(axis=1))
    scaled = wide / lax.broadcast_in_dim(of_rows, wide.shape, [0])
    store(numbers.at[pl.ds(first, EIGHT), inputs], rounded(scaled))
    within = pl.ds(lax.rem(first, plan.rows), EIGHT)
    store(scales.at[lax.div(first, plan.rows), piece, within], of_rows)


def rounded_whole_rows(
    plan: PlanOf8By8, rows: Float[Array, "tokens inputs"]
) -> tuple[Float[Array, "padded inputs"], Float[Array, " padded"]]:
    """Rows in e4m3 with a scale each, by XLA."""
    numbers, scales = quantised_pieces(padded(plan, rows)[:, None], whole_rows=True)
    return numbers[:, 0], scales[:, 0]
