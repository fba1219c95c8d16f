"""A product with a matrix of 8-bit floats."""

from jaxtyping import Array, Float

from pallas_kernels.dispatch import Implementation, Op
from pallas_kernels.fp8_product import reference


def fp8_product(
    x: Float[Array, "*tokens inputs"],
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
    t = max(largest magnitude / 448, 1 / (448 * 512)) for whole rows.

    There is no kernel yet: XLA reads the matrix as it is, but writes the products of all pieces.
    """
    options = {"quantise_inputs": quantise_inputs}
    return FP8_PRODUCT(implementation, x, weight, scales, **options)


FP8_PRODUCT = Op("fp8_product", {"xla": reference.fp8_product}, {})
