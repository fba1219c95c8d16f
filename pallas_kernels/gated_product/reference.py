"""`gated_product` in plain JAX: the specification."""

from jaxtyping import Array, Float

from pallas_kernels.fp8_product import reference as of_product
from pallas_kernels.fp8_product.rounded import RoundedRows
from pallas_kernels.silu_gate import reference as of_gate


def gated_product(
    x: RoundedRows,
    weight: Float[Array, "twice_inner inputs"],
    scales: Float[Array, "scaled_outputs pieces"],
) -> RoundedRows:
    gate_up = of_product.fp8_product(x, weight, scales)
    rounding = "rows" if len(scales) == len(weight) else "pieces"
    return of_gate.silu_gate(gate_up, dtype=x.dtype, rounding=rounding)
