"""`fp8_product` on Mosaic GPU, for Hopper: weights in 8 bits, inputs in 16."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.fp8_product import kernel
from pallas_kernels.fp8_product.plan import WARPGROUPS, plan_of
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
    dtype = x.dtype if plan.parts == 1 else jnp.float32
    product = plgpu.kernel(
        named("fp8_product", functools.partial(kernel.run, plan)),
        out_type=jax.ShapeDtypeStruct((plan.parts, plan.padded, plan.outputs), dtype),
        grid=(plan.parts, plan.tiles, plan.row_tiles),
        grid_names=("part", "tile", "row_tile"),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        scratch_types=plan.scratch(),
        interpret=interpret,
    )(
        jnp.pad(rows, ((0, plan.padded - plan.tokens), (0, 0))),
        weight,
        scales if plan.blocks else scales[:, 0],
    )
    return product[:, : plan.tokens].reshape(plan.parts, *x.shape[:-1], plan.outputs)
