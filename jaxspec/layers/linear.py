"""Weights that multiply and weights that look up."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels import add_norm
from pallas_kernels.dispatch import Implementation


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
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * self.scale.astype(jnp.float32)).astype(x.dtype)

    def after_adding(
        self,
        x: Float[Array, "*rows {self.features}"],
        addend: Float[Array, "*rows {self.features}"],
        implementation: Implementation,
    ) -> tuple[Float[Array, "*rows {self.features}"], Float[Array, "*rows {self.features}"]]:
        """The sum and its norm."""
        return add_norm(x, addend, self.scale, eps=self.eps, implementation=implementation)
