"""The gated activation of an MLP, rounded to 8 bits for the product that follows."""

from typing import Any

from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.dispatch import Implementation, Op
from pallas_kernels.fp8_product.rounded import RoundedRows, Rounding
from pallas_kernels.silu_gate import reference


def silu_gate(
    gate_up: Float[Array, "parts *tokens twice_inner"],
    *,
    dtype: DTypeLike,
    rounding: Rounding,
    implementation: Implementation = "auto",
) -> RoundedRows:
    """`silu(gate) * up`, rounded to 8 bits; each token's `gate_up` has gate first, then up.

    `gate_up` is what `fp8_product_in_parts` returns: float32 parts that are still to be added up,
    or one part in `dtype`. Their sum is rounded to `dtype`, as an unsplit product would be. The
    result is rounded to `dtype` too, and then to 8 bits, as `fp8_product` would round it.
    """
    return SILU_GATE(implementation, gate_up, dtype=dtype, rounding=rounding)


def _mosaic(*arguments: Any, **options: Any) -> Any:
    from pallas_kernels.silu_gate import mosaic  # importing Mosaic GPU takes a second

    return mosaic.silu_gate(*arguments, **options)


def _check(*arguments: Any, **options: Any) -> None:
    from pallas_kernels.silu_gate import mosaic

    mosaic.check(*arguments, **options)


SILU_GATE = Op("silu_gate", {"mosaic": _mosaic, "xla": reference.silu_gate}, {"mosaic": _check})
