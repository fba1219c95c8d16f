"""Residual sum and RMS norm between one sublayer and the next."""

from typing import Any

from jaxtyping import Array, Float

from pallas_kernels.add_norm import reference
from pallas_kernels.dispatch import Implementation, Op


def add_norm(
    x: Float[Array, "*tokens hidden"],
    addend: Float[Array, "parts *tokens hidden"],
    scale: Float[Array, " hidden"],
    *,
    eps: float,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "*tokens hidden"], Float[Array, "*tokens hidden"]]:
    """Returns `x` plus the sum of `addend`'s parts, and the root mean square norm of that total.

    The parts are those of a matrix product that was split over its inputs (`split_product`), in
    float32; a product that was not split is one part. Their sum is computed in float32 and rounded
    to the dtype of `x`, as the unsplit product would be; so is the total. The norm is computed in
    float32, with a scale in the dtype of `x` or in float32.
    """
    return ADD_NORM(implementation, x, addend, scale, eps=eps)


def _mosaic(*arguments: Any, **options: Any) -> Any:
    from pallas_kernels.add_norm import mosaic  # importing Mosaic GPU takes a second

    return mosaic.add_norm(*arguments, **options)


def _check(*arguments: Any, **options: Any) -> None:
    from pallas_kernels.add_norm import mosaic

    mosaic.check(*arguments, **options)


ADD_NORM = Op(
    "add_norm",
    {"mosaic": _mosaic, "portable": _mosaic, "xla": reference.add_norm},
    {"mosaic": _check, "portable": _check},
)
