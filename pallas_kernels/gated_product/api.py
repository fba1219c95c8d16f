"""The product with gate and up in 8 bits, gated and rounded for the product that follows."""

from typing import Any

from jaxtyping import Array, Float

from pallas_kernels.dispatch import Implementation, Op, kernels_meant
from pallas_kernels.fp8_product.rounded import RoundedRows
from pallas_kernels.gated_product import reference
from pallas_kernels.refusal import NotForThisKernel


def gated_product(
    x: RoundedRows,
    weight: Float[Array, "twice_inner inputs"],
    scales: Float[Array, "scaled_outputs pieces"],
    *,
    implementation: Implementation = "auto",
) -> RoundedRows:
    """`silu_gate` of `fp8_product`, with the same bits, but gate and up are not written to memory.

    The matrix has the rows of gate first, then those of up.
    """
    return GATED_PRODUCT(implementation, x, weight, scales)


def runs_in_one_kernel(
    implementation: Implementation,
    x: RoundedRows,
    weight: Float[Any, "twice_inner inputs"],
    scales: Float[Any, "scaled_outputs pieces"],
) -> bool:
    """Whether the kernel can do this call, and faster than a product and `silu_gate` can."""
    if kernels_meant(implementation) != "mosaic":
        return False
    from pallas_kernels.gated_product.plan import plan_of_gates

    try:
        return plan_of_gates(x, weight, scales).pays
    except NotForThisKernel:
        return False


def _mosaic(*arguments: Any) -> Any:
    from pallas_kernels.gated_product import mosaic  # importing Mosaic GPU takes a second

    return mosaic.gated_product(*arguments)


def _check(*arguments: Any) -> None:
    from pallas_kernels.gated_product.plan import plan_of_gates

    plan_of_gates(*arguments)


GATED_PRODUCT = Op(
    "gated_product", {"mosaic": _mosaic, "xla": reference.gated_product}, {"mosaic": _check}
)
