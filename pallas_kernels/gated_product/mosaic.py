"""`gated_product` on Mosaic GPU, for Hopper: with more than 64 rows, and with fewer."""

import functools

import jax
from jaxtyping import Array, Float

from pallas_kernels.fp8_product.plan_of import ACTIVATIONS
from pallas_kernels.fp8_product.quantise import E4M3
from pallas_kernels.fp8_product.rounded import RoundedRows
from pallas_kernels.fp8_product.rounding import padded, type_of_scales
from pallas_kernels.gated_product import kernel, kernel_few_rows
from pallas_kernels.gated_product.plan import PlanOfGates, plan_of_gates
from pallas_kernels.jax_internals import plgpu
from pallas_kernels.kept import kept
from pallas_kernels.tiles import named


def gated_product(
    x: RoundedRows,
    weight: Float[Array, "twice_inner inputs"],
    scales: Float[Array, "scaled_outputs pieces"],
    *,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> RoundedRows:
    plan_of_gates(x, weight, scales)
    numbers, out_scales = gates_of_rounded(x.numbers, x.scales, weight, scales, interpret=interpret)
    return RoundedRows(numbers, out_scales, x.dtype)


@kept(static_argnames=("interpret",))
def gates_of_rounded(
    numbers: Float[Array, "*tokens inputs"],
    row_scales: Float[Array, "row_tiles pieces size"],
    weight: Float[Array, "twice_inner inputs"],
    scales: Float[Array, "scaled_outputs pieces"],
    *,
    interpret: plgpu.InterpretGPUParams | None,
) -> tuple[Float[Array, "*tokens inner"], Float[Array, "row_tiles inner_pieces size"]]:
    x = RoundedRows(numbers, row_scales, ACTIVATIONS)
    plan = plan_of_gates(x, weight, scales, interpreted=interpret is not None)
    run = kernel.run if isinstance(plan, PlanOfGates) else kernel_few_rows.run
    rows, inner = numbers.reshape(plan.tokens, plan.inputs), plan.outputs // 2
    gated, out_scales = plgpu.kernel(
        named("gated_product", functools.partial(run, plan)),
        out_type=(
            jax.ShapeDtypeStruct((plan.padded, inner), E4M3),
            type_of_scales(plan.tokens, inner, "pieces"),
        ),
        grid=tuple(plan.grid.values()),
        grid_names=tuple(plan.grid),
        num_threads=plan.warpgroups,
        thread_name="warpgroup",
        scratch_types=plan.scratch(),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(padded(plan.tiles_of_rows, rows), weight, scales, row_scales)
    return gated[: plan.tokens].reshape(*numbers.shape[:-1], inner), out_scales
