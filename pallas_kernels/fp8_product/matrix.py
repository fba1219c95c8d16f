"""A matrix of 8-bit floats as one argument."""

from typing import NamedTuple

from jaxtyping import Array, Float


class Fp8Matrix(NamedTuple):
    """A matrix of e4m3 numbers, stored [outputs, inputs], and its scales, as `fp8_product` takes
    them."""

    weight: Float[Array, "outputs inputs"]
    scales: Float[Array, "scaled_outputs pieces"]
