"""Residual sum and RMS norm between one sublayer and the next."""

from typing import Any

from jaxtyping import Array, Float

from pallas_kernels.add_norm import reference
from pallas_kernels.dispatch import Implementation, Op
from pallas_kernels.fp8_product.rounded import RoundedRows, Rounding
from pallas_kernels.refusal import require


def add_norm(
    x: Float[Array, "*tokens hidden"],
    addend: Float[Array, "parts *tokens hidden"],
    scale: Float[Array, " hidden"],
    *,
    eps: float,
    rounding: Rounding | None = None,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "*tokens hidden"], Float[Array, "*tokens hidden"] | RoundedRows]:
    """Returns the sum of `x` and all parts of `addend`, and the RMS norm of that sum:

        total = x + sum of the parts
        norm  = total / sqrt(mean(total ** 2) + eps) * scale           for each token

    The parts are those of a matrix product that was split over its inputs (`split_product`), in
    float32; a product that was not split is one part. Their sum is computed in float32 and rounded
    to the dtype of `x`, as the unsplit product would be; so is the total. The norm is computed in
    float32, with a scale in the dtype of `x` or in float32.

    With `rounding` the norm is rounded once more, to 8 bits, as `fp8_product` would round it.
    """
    return ADD_NORM(implementation, x, addend, scale, eps=eps, rounding=rounding)


def _mosaic(*arguments: Any, **options: Any) -> Any:
    from pallas_kernels.add_norm import mosaic  # importing Mosaic GPU takes a second

    return mosaic.add_norm(*arguments, **options)


def _check(*arguments: Any, **options: Any) -> None:
    from pallas_kernels.add_norm import mosaic

    mosaic.check(*arguments, **options)


def _check_portable(*arguments: Any, rounding: Rounding | None = None, **options: Any) -> None:
    require(rounding is None, "a norm that is rounded to 8 bits", "one in 16 or 32 bits")
    _check(*arguments, **options)


ADD_NORM = Op(
    "add_norm",
    {"mosaic": _mosaic, "portable": _mosaic, "xla": reference.add_norm},
    {"mosaic": _check, "portable": _check_portable},
)
