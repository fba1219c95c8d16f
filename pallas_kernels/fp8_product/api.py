"""A product with a matrix of 8-bit floats."""

from typing import Any

from jaxtyping import Array, Float

from pallas_kernels.dispatch import Implementation, Op
from pallas_kernels.fp8_product import reference
from pallas_kernels.fp8_product.rounded import RoundedRows
from pallas_kernels.split_product import total_of


def fp8_product(
    x: Float[Array, "*tokens inputs"] | RoundedRows,
    weight: Float[Array, "outputs inputs"],
    scales: Float[Array, "scaled_outputs pieces"],
    *,
    quantise_inputs: bool = False,
    implementation: Implementation = "auto",
) -> Float[Array, "*tokens outputs"]:
    """The product of `x` with a matrix of e4m3 numbers times their scales. For output n, with q for
    the numbers and s for the scales:

        y[n] = sum over pieces p of s[n, p] * (sum over inputs k of piece p of x[k] * q[n, k])

    One scale belongs to a block of 128 x 128 numbers, `scales` [outputs / 128, inputs / 128], or to
    all inputs of one output, `scales` [outputs, 1]. No number of the matrix is rounded, sums are
    float32, and the result is rounded to the dtype of `x`.

    With `quantise_inputs` each row of `x` is rounded to e4m3 too, with a scale for every piece of
    it: t = max(largest magnitude, 1e-10) / 448 for pieces of 128, or
    t = max(largest magnitude / 448, 1 / (448 * 512)) for whole rows. `RoundedRows` are rows that
    the op before has already rounded in this way.

    The kernels are for inputs in bfloat16. XLA reads the matrix in 8 bits as well, but writes the
    products of all pieces to memory before it adds them up.
    """
    parts = fp8_product_in_parts(
        x, weight, scales, quantise_inputs=quantise_inputs, implementation=implementation
    )
    return total_of(parts, x.dtype)


def fp8_product_in_parts(
    x: Float[Array, "*tokens inputs"] | RoundedRows,
    weight: Float[Array, "outputs inputs"],
    scales: Float[Array, "scaled_outputs pieces"],
    *,
    quantise_inputs: bool = False,
    implementation: Implementation = "auto",
) -> Float[Array, "parts *tokens outputs"]:
    """The product of `fp8_product` as float32 parts that are still to be added up, or as one part
    in the dtype of `x`.

    The kernel splits the inputs into parts if it is faster with more thread blocks. The op that
    reads the parts adds them up, which saves a kernel.
    """
    options = {"quantise_inputs": quantise_inputs}
    return FP8_PRODUCT(implementation, x, weight, scales, **options)


def _mosaic(*arguments: Any, **options: Any) -> Any:
    from pallas_kernels.fp8_product import mosaic  # importing Mosaic GPU takes a second

    return mosaic.fp8_product(*arguments, **options)


def _check(*arguments: Any, **options: Any) -> None:
    from pallas_kernels.fp8_product.plan_of import plan_of

    plan_of(*arguments, **options)


FP8_PRODUCT = Op(
    "fp8_product", {"mosaic": _mosaic, "xla": reference.fp8_product}, {"mosaic": _check}
)
"""Its implementations return parts."""
