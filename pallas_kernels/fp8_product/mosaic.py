"""`fp8_product` on Mosaic GPU, for Hopper: weights in 8 bits, inputs in 16 or rounded to 8.

One thread block takes a tile of 128, 192 or 256 outputs, a tile of up to 128 rows and one part of
the inputs; `plan.py` says how these are chosen. `kernel.py` widens the weights. `kernel_8_by_8.py`
multiplies 8 bits by 8 bits, and `kernel_8_by_8_many_rows.py` does so with more than 64 rows.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.fp8_product import kernel, kernel_8_by_8, kernel_8_by_8_many_rows
from pallas_kernels.fp8_product.plan import Plan, Split
from pallas_kernels.fp8_product.plan_8_by_8 import PlanOf8By8
from pallas_kernels.fp8_product.plan_8_by_8_many_rows import PlanOfManyRows
from pallas_kernels.fp8_product.plan_of import ACTIVATIONS, plan_of
from pallas_kernels.fp8_product.rounded import RoundedRows
from pallas_kernels.fp8_product.rounding import padded, round_rows
from pallas_kernels.jax_internals import plgpu
from pallas_kernels.kept import kept
from pallas_kernels.tiles import named

BODIES = {
    Plan: kernel.run,
    PlanOf8By8: kernel_8_by_8.run,
    PlanOfManyRows: kernel_8_by_8_many_rows.run,
}
"""The kernel for each kind of plan."""


def fp8_product(
    x: Float[Array, "*tokens inputs"] | RoundedRows,
    weight: Float[Array, "outputs inputs"],
    scales: Float[Array, "scaled_outputs pieces"],
    *,
    quantise_inputs: bool = False,
    split: Split | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "parts *tokens outputs"]:
    if not isinstance(x, RoundedRows):
        options = {"quantise_inputs": quantise_inputs, "split": split, "interpret": interpret}
        return product_of_rows(x, weight, scales, **options)
    plan_of(x, weight, scales)
    arrays = x.numbers, x.scales, weight, scales
    return product_of_rounded(*arrays, split=split, interpret=interpret)


@kept(static_argnames=("quantise_inputs", "split", "interpret"))
def product_of_rows(
    x: Float[Array, "*tokens inputs"],
    weight: Float[Array, "outputs inputs"],
    scales: Float[Array, "scaled_outputs pieces"],
    *,
    quantise_inputs: bool,
    split: Split | None,
    interpret: plgpu.InterpretGPUParams | None,
) -> Float[Array, "parts *tokens outputs"]:
    interpreted = interpret is not None
    options = {"quantise_inputs": quantise_inputs, "interpreted": interpreted, "split": split}
    plan = plan_of(x, weight, scales, **options)
    rows = x.reshape(plan.tokens, plan.inputs)
    if isinstance(plan, PlanOf8By8):
        operands = round_rows(rows, plan.rounding, interpret)
    else:
        operands = (padded(plan.tiles_of_rows, rows),)
    return multiplied(plan, operands, weight, scales, interpret).reshape(
        plan.parts, *x.shape[:-1], plan.outputs
    )


@kept(static_argnames=("split", "interpret"))
def product_of_rounded(
    numbers: Float[Array, "*tokens inputs"],
    row_scales: Float[Array, "row_tiles pieces size"],
    weight: Float[Array, "outputs inputs"],
    scales: Float[Array, "scaled_outputs pieces"],
    *,
    split: Split | None,
    interpret: plgpu.InterpretGPUParams | None,
) -> Float[Array, "parts *tokens outputs"]:
    x = RoundedRows(numbers, row_scales, ACTIVATIONS)
    plan = plan_of(x, weight, scales, interpreted=interpret is not None, split=split)
    rows = numbers.reshape(plan.tokens, plan.inputs)
    operands = padded(plan.tiles_of_rows, rows), row_scales
    return multiplied(plan, operands, weight, scales, interpret).reshape(
        plan.parts, *numbers.shape[:-1], plan.outputs
    )


def multiplied(
    plan: Plan,
    operands: tuple[Array, ...],
    weight: Float[Array, "outputs inputs"],
    scales: Float[Array, "scaled_outputs pieces"],
    interpret: plgpu.InterpretGPUParams | None,
) -> Float[Array, "parts tokens outputs"]:
    """The product, without padding; `operands` are the padded rows, and their scales if they are in
    8 bits."""
    rows, *row_scales = operands
    product = plgpu.kernel(
        named("fp8_product", functools.partial(BODIES[type(plan)], plan)),
        out_type=jax.ShapeDtypeStruct(
            (plan.parts, plan.padded, plan.outputs),
            plan.dtype if plan.parts == 1 else jnp.float32,
        ),
        grid=tuple(plan.grid.values()),
        grid_names=tuple(plan.grid),
        num_threads=plan.warpgroups,
        thread_name="warpgroup",
        scratch_types=plan.scratch(),
        interpret=interpret,
    )(rows, weight, scales if plan.blocks else scales[:, 0], *row_scales)
    return product[:, : plan.tokens]
