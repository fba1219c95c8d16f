"""Weights that multiply and weights that look up."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels import add_norm
from pallas_kernels.add_norm.reference import rms_norm
from pallas_kernels.dispatch import Implementation, kernels_run

MOST_PARTS = 4
ROWS_IN_PARTS = range(2, 129)
"""One row XLA multiplies in another way, which parts make slower; many need no parts."""


def parts_of(rows: int, inputs: int, outputs: int) -> int:
    """Into how many parts a product is split for kernels that add them up on a GPU.

    As many as give every multiprocessor of an H100 a block of XLA's matrix kernels: 128 x 128
    numbers of the output, or, of few rows, three blocks of 64 columns.
    """
    if rows not in ROWS_IN_PARTS:
        return 1
    blocks, wanted = (-(-outputs // 64), 384) if rows <= 32 else (-(-outputs // 128), 132)
    parts = MOST_PARTS
    while parts > 1 and (blocks * parts > wanted or inputs % (parts * 128)):
        parts //= 2
    return parts


class Linear(nn.Module):
    """A matrix without bias, stored [inputs, outputs]."""

    inputs: int
    outputs: int
    dtype: DTypeLike

    def setup(self) -> None:
        scale = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
        self.kernel = self.param("kernel", scale, (self.inputs, self.outputs), self.dtype)

    def __call__(
        self, x: Float[Array, "*rows {self.inputs}"]
    ) -> Float[Array, "*rows {self.outputs}"]:
        return x @ self.kernel

    def in_parts(
        self, x: Float[Array, "*rows {self.inputs}"], implementation: Implementation
    ) -> Float[Array, "parts *rows {self.outputs}"]:
        """The product as a sum that the next kernel adds up: few rows meet a matrix faster when
        more thread blocks read it, each a part of the inputs."""
        parts = parts_of(x.size // self.inputs, self.inputs, self.outputs)
        if parts == 1 or not kernels_run(implementation):
            return self(x)[None]
        split = x.reshape(-1, parts, self.inputs // parts)
        kernel = self.kernel.reshape(parts, -1, self.outputs)
        product = jnp.einsum("rpi,pio->pro", split, kernel, preferred_element_type=jnp.float32)
        return product.reshape(parts, *x.shape[:-1], self.outputs)

    def columns(
        self, x: Float[Array, "*rows {self.inputs}"], start: int
    ) -> Float[Array, "*rows outputs"]:
        """Only the outputs from `start` on."""
        return x @ self.kernel[:, start:]


class Embedding(nn.Module):
    """A row per token; also the head of a tied model."""

    vocab_size: int
    features: int
    dtype: DTypeLike

    def setup(self) -> None:
        init = nn.initializers.normal(0.02)
        self.embedding = self.param("embedding", init, (self.vocab_size, self.features), self.dtype)

    def __call__(self, tokens: Int[Array, "*rows"]) -> Float[Array, "*rows {self.features}"]:
        return jnp.take(self.embedding, tokens, axis=0)

    def logits(
        self, x: Float[Array, "*rows {self.features}"]
    ) -> Float[Array, "*rows {self.vocab_size}"]:
        return jax.lax.dot_general(x, self.embedding, (((x.ndim - 1,), (1,)), ((), ())))


class RMSNorm(nn.Module):
    """Root mean square norm, computed in float32."""

    features: int
    eps: float
    dtype: DTypeLike

    def setup(self) -> None:
        self.scale = self.param("scale", nn.initializers.ones, (self.features,), self.dtype)

    def __call__(
        self, x: Float[Array, "*rows {self.features}"]
    ) -> Float[Array, "*rows {self.features}"]:
        return rms_norm(x, self.scale, eps=self.eps)

    def after_adding(
        self,
        x: Float[Array, "*rows {self.features}"],
        addend: Float[Array, "parts *rows {self.features}"],
        implementation: Implementation,
    ) -> tuple[Float[Array, "*rows {self.features}"], Float[Array, "*rows {self.features}"]]:
        """`x` plus the sum of the addend's parts, and the norm of that."""
        return add_norm(x, addend, self.scale, eps=self.eps, implementation=implementation)
