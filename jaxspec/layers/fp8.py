"""Linear layers whose matrix is stored as 8-bit floats (e4m3) with float32 scales beside them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key

from jaxspec.layers.axes import Axis, Fused, sections_of, size_of
from jaxspec.layers.linear import Linear
from jaxspec.layers.parameter import parameter
from jaxspec.layers.shards import Shards
from pallas_kernels import fp8_product, silu_gate
from pallas_kernels.dispatch import Implementation
from pallas_kernels.fp8_product import (
    BLOCK,
    E4M3,
    Fp8Matrix,
    RoundedRows,
    Rounding,
    fp8_product_in_parts,
)
from pallas_kernels.fp8_product.quantise import rounded, scales_of_rows
from pallas_kernels.gated_product import gated_product, runs_in_one_kernel


@dataclasses.dataclass(frozen=True)
class Fp8:
    """How the matrices of a stack of decoder layers are stored as 8-bit floats."""

    blocks: bool
    """Whether a scale belongs to a block of 128 x 128 numbers; if not, to all inputs of one output.
    """
    quantised_inputs: bool = False
    """Whether activations are rounded to 8 bits before a product: in pieces of 128 inputs if the
    matrix has blocks, else row by row."""
    implementation: Implementation = "auto"
    """Which implementation of `fp8_product` multiplies. A model sets its own."""

    def scaled(self, axis: Axis | Fused) -> Axis | Fused:
        """The axis of the scales that belong to an axis of outputs."""
        if not self.blocks:
            return axis
        parts = tuple(map(_in_blocks, sections_of(axis)))
        return parts[0] if isinstance(axis, Axis) else parts

    def pieces(self, axis: Axis) -> Axis:
        """The axis of the scales that belong to the axis of inputs."""
        return _in_blocks(axis) if self.blocks else Axis("all_inputs", 1)

    @property
    def rounding(self) -> Rounding | None:
        """Which parts of the activations have one scale each; None if they are not rounded."""
        if not self.quantised_inputs:
            return None
        return "pieces" if self.blocks else "rows"

    def rounds_before(self, inputs: Axis) -> bool:
        """Whether rows are rounded before the product, because each row has one scale and every
        device has only a part of the row."""
        return self.quantised_inputs and not self.blocks and inputs.shards.count > 1


def _in_blocks(axis: Axis) -> Axis:
    assert axis.size % BLOCK == 0, f"{axis.size} outputs or inputs are no whole blocks"
    in_blocks = {"size": axis.size // BLOCK, "unit": max(1, axis.unit // BLOCK)}
    return dataclasses.replace(axis, **in_blocks)


class Fp8Linear(nn.Module):
    """A `Linear` whose matrix is stored [outputs, inputs] in e4m3, as in checkpoints."""

    inputs: Axis
    outputs: Axis | Fused
    fp8: Fp8

    def setup(self) -> None:
        spread = Even(SPREAD * self.inputs.size**0.5)
        scaled = self.fp8.scaled(self.outputs), self.fp8.pieces(self.inputs)
        self.weight = parameter(self, "weight", random_numbers, (self.outputs, self.inputs), E4M3)
        self.scales = parameter(self, "scales", spread, scaled, jnp.float32)

    def __call__(
        self, x: Float[Array, "*tokens {self.inputs.size}"]
    ) -> Float[Array, "*tokens outputs"]:
        return self.inputs.shards.summed(self.own_part(x))

    def own_part(
        self, x: Float[Array, "*tokens {self.inputs.size}"]
    ) -> Float[Array, "*tokens outputs"]:
        """This device's part of the product: a partial sum if inputs are cut."""
        if not self.fp8.rounds_before(self.inputs):
            return self._product(x, self.weight, self.scales)
        numbers, scales = rounded_over(self.inputs.shards, x)
        product = self._product(numbers, self.weight, self.scales, is_rounded=True)
        return (product * scales).astype(x.dtype)

    def columns(
        self, x: Float[Array, "*tokens {self.inputs.size}"], start: int
    ) -> Float[Array, "*tokens outputs"]:
        """The product with only the outputs from section `start` on."""
        return self._product(x, *self._from_section(start))

    def columns_in_parts(
        self,
        x: Float[Array, "*tokens {self.inputs.size}"],
        start: int,
        implementation: Implementation,
    ) -> Float[Array, "parts *tokens outputs"]:
        """The same as parts whose sum is left to the kernel that reads it."""
        return self._in_parts(x, self._from_section(start), implementation)

    def _from_section(self, start: int) -> Fp8Matrix:
        """The rows of weights and scales that belong to the outputs from section `start` on."""
        assert isinstance(self.outputs, tuple), "only a fused matrix has sections"
        before = self.outputs[:start]
        scales = self.scales[size_of(self.fp8.scaled(before)) :]
        return Fp8Matrix(self.weight[size_of(before) :], scales)

    @property
    def rounding(self) -> Rounding | None:
        """How the inputs of `in_parts` are rounded to 8 bits; None if they are not. `in_parts` can
        round them itself, but an op that rounds them while it writes them saves a kernel."""
        return self.fp8.rounding

    def in_parts(
        self,
        x: Float[Array, "*tokens {self.inputs.size}"] | RoundedRows,
        implementation: Implementation,
    ) -> Float[Array, "parts *tokens outputs"]:
        """The product as parts whose sum is left to the kernel that reads it."""
        if self.fp8.rounds_before(self.inputs):
            assert not isinstance(x, RoundedRows), "every device has only a part of these rows"
            return self.own_part(x)[None]
        return self._in_parts(x, self.operand(), implementation)

    def gated(
        self,
        x: Float[Array, "*tokens {self.inputs.size}"] | RoundedRows,
        rounding: Rounding,
        implementation: Implementation,
    ) -> RoundedRows:
        """`silu(gate) * up` of a product with gate and up, rounded to 8 bits for the next one."""
        if isinstance(x, RoundedRows) and runs_in_one_kernel(implementation, x, *self.operand()):
            return gated_product(x, *self.operand(), implementation=implementation)
        parts = self.in_parts(x, implementation)
        return silu_gate(parts, dtype=x.dtype, rounding=rounding, implementation=implementation)

    def operand(self) -> Fp8Matrix:
        """The matrix itself, for a kernel that multiplies by it."""
        return Fp8Matrix(self.weight, self.scales)

    def _in_parts(
        self,
        x: Float[Array, "*tokens inputs"] | RoundedRows,
        matrix: Fp8Matrix,
        implementation: Implementation,
    ) -> Float[Array, "parts *tokens outputs"]:
        quantised = self.fp8.quantised_inputs
        options = {"quantise_inputs": quantised, "implementation": implementation}
        return fp8_product_in_parts(x, *matrix, **options)

    def _product(
        self,
        x: Float[Array, "*tokens inputs"],
        weight: Float[Array, "outputs inputs"],
        scales: Float[Array, "scaled_outputs pieces"],
        is_rounded: bool = False,
    ) -> Float[Array, "*tokens outputs"]:
        return fp8_product(
            x,
            weight,
            scales,
            quantise_inputs=self.fp8.quantised_inputs and not is_rounded,
            implementation=self.fp8.implementation,
        )


def rounded_over(
    shards: Shards, x: Float[Array, "*tokens inputs"]
) -> tuple[Float[Array, "*tokens inputs"], Float[Array, "*tokens pieces"]]:
    """A device's part of rows, rounded to e4m3 but kept in the dtype of `x`, which can hold every
    e4m3 number; and the scale of each whole row."""
    wide = x.astype(jnp.float32)
    scales = scales_of_rows(shards.largest(abs(wide).max(axis=-1, keepdims=True)))
    numbers: Any = rounded(wide / scales)
    return numbers.astype(x.dtype), scales


def is_fp8_matrix(node: object) -> bool:
    """Whether this part of a tree of parameters belongs to an `Fp8Linear`."""
    return isinstance(node, dict) and node.keys() == {"weight", "scales"}


SPREAD = 64.0
"""Standard deviation of random weights, the largest of which are near the largest e4m3 number."""


def random_numbers(key: Key[Array, ""], shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    return (jax.random.normal(key, shape, jnp.bfloat16) * SPREAD).astype(dtype)


@dataclasses.dataclass(frozen=True)
class Even:
    """Makes scales that are all 1 / `divisor`."""

    divisor: float

    def __call__(self, key: Key[Array, ""], shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        return jnp.full(shape, 1 / self.divisor, dtype)


Matrix = Linear | Fp8Linear


def matrix(inputs: Axis, outputs: Axis | Fused, dtype: DTypeLike, fp8: Fp8 | None) -> Matrix:
    """A matrix of a decoder layer, in 8 bits if `fp8` says how, else in the model's dtype."""
    return Linear(inputs, outputs, dtype) if fp8 is None else Fp8Linear(inputs, outputs, fp8)
