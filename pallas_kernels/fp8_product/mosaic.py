"""`fp8_product` on Mosaic GPU, for Hopper: weights in 8 bits, inputs in 16 or rounded to 8."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.fp8_product import kernel, kernel_8_by_8
from pallas_kernels.fp8_product.plan import WARPGROUPS, Plan
from pallas_kernels.fp8_product.plan_8_by_8 import PlanOf8By8
from pallas_kernels.fp8_product.plan_of import plan_of
from pallas_kernels.fp8_product.quantise import quantised_pieces
from pallas_kernels.jax_internals import plgpu
from pallas_kernels.kept import kept
from pallas_kernels.tiles import named


@kept(static_argnames=("quantise_inputs", "interpret"))
def fp8_product(
    x: Float[Array, "*tokens inputs"],
    weight: Float[Array, "outputs inputs"],
    scales: Float[Array, "scaled_outputs pieces"],
    *,
    quantise_inputs: bool = False,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "parts *tokens outputs"]:
    options = {"quantise_inputs": quantise_inputs, "interpreted": interpret is not None}
    plan = plan_of(x, weight, scales, **options)
    rows = x.reshape(plan.tokens, plan.inputs)
    scales = scales if plan.blocks else scales[:, 0]
    if isinstance(plan, PlanOf8By8):
        numbers, row_scales = rounded_rows(plan, rows)
        body, operands = kernel_8_by_8.run, (numbers, weight, scales, row_scales)
    else:
        body, operands = kernel.run, (padded(plan, rows), weight, scales)
    dtype = x.dtype if plan.parts == 1 else jnp.float32
    product = plgpu.kernel(
        named("fp8_product", functools.partial(body, plan)),
        out_type=jax.ShapeDtypeStruct((plan.parts, plan.padded, plan.outputs), dtype),
        grid=(plan.parts, plan.tiles, plan.row_tiles),  # the last runs first: it shares weights
        grid_names=("part", "tile", "row_tile"),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        scratch_types=plan.scratch(),
        interpret=interpret,
    )(*operands)
    return product[:, : plan.tokens].reshape(plan.parts, *x.shape[:-1], plan.outputs)


def padded(plan: Plan, rows: Float[Array, "tokens numbers"]) -> Float[Array, "padded numbers"]:
    return jnp.pad(rows, ((0, plan.padded - plan.tokens), (0, 0)))


def rounded_rows(
    plan: PlanOf8By8, rows: Float[Array, "tokens inputs"]
) -> tuple[
    Float[Array, "padded inputs"],
    Float[Array, "row_tiles pieces at_once"] | Float[Array, " padded"],
]:
    """Rows in e4m3 and their scales: tile by tile, or one for each row."""
    in_pieces = rows.reshape(plan.tokens, plan.pieces, -1)
    numbers, scales = quantised_pieces(in_pieces, whole_rows=not plan.blocks)
    numbers, scales = padded(plan, numbers.reshape(rows.shape)), padded(plan, scales)
    if not plan.blocks:
        return numbers, scales[:, 0]
    by_piece = scales.reshape(plan.row_tiles, plan.rows, plan.pieces).swapaxes(1, 2)
    return numbers, jnp.pad(by_piece, ((0, 0), (0, 0), (0, plan.scales_at_once - plan.rows)))
