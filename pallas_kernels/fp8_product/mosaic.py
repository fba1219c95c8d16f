"""`fp8_product` on Mosaic GPU, for Hopper: weights in 8 bits, inputs in 16 or rounded to 8."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.fp8_product import kernel, kernel_8_by_8
from pallas_kernels.fp8_product.plan import Split
from pallas_kernels.fp8_product.plan_8_by_8 import PlanOf8By8
from pallas_kernels.fp8_product.plan_of import plan_of
from pallas_kernels.fp8_product.rounding import padded, rounded_rows
from pallas_kernels.jax_internals import plgpu
from pallas_kernels.kept import kept
from pallas_kernels.tiles import named


@kept(static_argnames=("quantise_inputs", "split", "interpret"))
def fp8_product(
    x: Float[Array, "*tokens inputs"],
    weight: Float[Array, "outputs inputs"],
    scales: Float[Array, "scaled_outputs pieces"],
    *,
    quantise_inputs: bool = False,
    split: Split | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "parts *tokens outputs"]:
    plan = plan_of(
        x,
        weight,
        scales,
        quantise_inputs=quantise_inputs,
        interpreted=interpret is not None,
        split=split,
    )
    rows = x.reshape(plan.tokens, plan.inputs)
    scales = scales if plan.blocks else scales[:, 0]
    if isinstance(plan, PlanOf8By8):
        numbers, row_scales = rounded_rows(plan, rows, interpret)
        body, operands = kernel_8_by_8.run, (numbers, weight, scales, row_scales)
    else:
        body, operands = kernel.run, (padded(plan, rows), weight, scales)
    dtype = x.dtype if plan.parts == 1 else jnp.float32
    product = plgpu.kernel(
        named("fp8_product", functools.partial(body, plan)),
        out_type=jax.ShapeDtypeStruct((plan.parts, plan.padded, plan.outputs), dtype),
        # The last runs first: it shares weights.
        grid=(plan.parts, plan.tiles, plan.row_tiles),
        grid_names=("part", "tile", "row_tile"),
        num_threads=plan.warpgroups,
        thread_name="warpgroup",
        scratch_types=plan.scratch(),
        interpret=interpret,
    )(*operands)
    return product[:, : plan.tokens].reshape(plan.parts, *x.shape[:-1], plan.outputs)
