"""Linear layers, embeddings and norms."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxspec.layers.axes import Axis, Fused, size_of
from jaxspec.layers.parameter import keeps_scale, ones, parameter, small, zeros
from jaxspec.layers.shards import AXIS
from pallas_kernels import add_norm, split_product
from pallas_kernels.add_norm.reference import rms_norm
from pallas_kernels.dispatch import Implementation
from pallas_kernels.exchange import Inboxes, exchange_norm
from pallas_kernels.fp8_product import RoundedRows, Rounding


class Linear(nn.Module):
    """A matrix without bias, stored [inputs, outputs]. All products with it go through this class.

    A fused matrix has several sections of outputs, for example those of q, k and v.
    """

    inputs: Axis
    outputs: Axis | Fused
    dtype: DTypeLike

    def setup(self) -> None:
        axes = self.inputs, self.outputs
        self.kernel = parameter(self, "kernel", keeps_scale, axes, self.dtype)

    def __call__(
        self, x: Float[Array, "*tokens {self.inputs.size}"]
    ) -> Float[Array, "*tokens outputs"]:
        return self.inputs.shards.summed(self.own_part(x))

    def own_part(
        self, x: Float[Array, "*tokens {self.inputs.size}"]
    ) -> Float[Array, "*tokens outputs"]:
        """This device's part of the product: a partial sum if inputs are cut."""
        return x @ self.kernel

    def columns(
        self, x: Float[Array, "*tokens {self.inputs.size}"], start: int
    ) -> Float[Array, "*tokens outputs"]:
        """The product with only the outputs from section `start` on."""
        assert isinstance(self.outputs, tuple), "only a fused matrix has sections"
        return x @ self.kernel[:, size_of(self.outputs[:start]) :]

    def columns_in_parts(
        self,
        x: Float[Array, "*tokens {self.inputs.size}"],
        start: int,
        implementation: Implementation,
    ) -> Float[Array, "parts *tokens outputs"]:
        """The same as one part: XLA takes the columns out of the matrix while it multiplies."""
        return self.columns(x, start)[None]

    @property
    def rounding(self) -> None:
        """None, because the inputs of `in_parts` are not rounded to 8 bits."""
        return None

    def in_parts(
        self,
        x: Float[Array, "*tokens {self.inputs.size}"] | RoundedRows,
        implementation: Implementation,
    ) -> Float[Array, "parts *tokens outputs"]:
        """The product as parts whose sum is left to the kernel that reads it."""
        assert not isinstance(x, RoundedRows), "this matrix did not ask for it"
        return split_product(x, self.operand(), implementation=implementation)

    def operand(self) -> Float[Array, "inputs outputs"]:
        """The matrix itself, for a kernel that multiplies by it."""
        return self.kernel


class BiasedLinear(nn.Module):
    """A small matrix with a bias, whose inputs are several vectors side by side."""

    inputs: Fused
    outputs: Axis | Fused
    dtype: DTypeLike

    def setup(self) -> None:
        axes = self.inputs, self.outputs
        self.kernel = parameter(self, "kernel", keeps_scale, axes, self.dtype)
        self.bias = parameter(self, "bias", zeros, (self.outputs,), self.dtype)

    def __call__(self, *inputs: Float[Array, "..."]) -> Float[Array, "*tokens outputs"]:
        return jnp.concatenate(inputs, axis=-1) @ self.kernel + self.bias


class Embedding(nn.Module):
    """A vector per token, which is also the head of a model with tied weights."""

    vocab: Axis
    hidden: Axis
    dtype: DTypeLike

    def setup(self) -> None:
        axes = self.vocab, self.hidden
        self.embedding = parameter(self, "embedding", small, axes, self.dtype)

    def __call__(self, tokens: Int[Array, "*tokens"]) -> Float[Array, "*tokens {self.hidden.size}"]:
        if self.vocab.shards.count > 1:
            return self._of_all_shards(tokens)
        return jnp.take(self.embedding, tokens, axis=0)

    def _of_all_shards(
        self, tokens: Int[Array, "*tokens"]
    ) -> Float[Array, "*tokens {self.hidden.size}"]:
        """The row of each token, which only one device has; the other devices add zeros."""
        here = tokens - self.vocab.shards.first(self.vocab.size)
        is_mine = (here >= 0) & (here < self.vocab.size)
        rows = jnp.take(self.embedding, jnp.where(is_mine, here, 0), axis=0)
        return self.vocab.shards.summed(jnp.where(is_mine[..., None], rows, 0))

    def logits(
        self, x: Float[Array, "*tokens {self.hidden.size}"]
    ) -> Float[Array, "*tokens {self.vocab.size}"]:
        return jax.lax.dot_general(x, self.embedding, (((x.ndim - 1,), (1,)), ((), ())))


class RMSNorm(nn.Module):
    """Root mean square norm, computed in float32."""

    axis: Axis
    eps: float
    dtype: DTypeLike

    def setup(self) -> None:
        self.scale = parameter(self, "scale", ones, (self.axis,), self.dtype)

    def __call__(
        self, x: Float[Array, "*tokens {self.axis.size}"]
    ) -> Float[Array, "*tokens {self.axis.size}"]:
        return rms_norm(x, self.scale, eps=self.eps)

    def after_adding(
        self,
        x: Float[Array, "*tokens {self.axis.size}"],
        addend: Float[Array, "parts *tokens {self.axis.size}"],
        implementation: Implementation,
        rounding: Rounding | None = None,
    ) -> tuple[
        Float[Array, "*tokens {self.axis.size}"],
        Float[Array, "*tokens {self.axis.size}"] | RoundedRows,
    ]:
        """`x` plus the sum of the addend's parts, and the norm of that, which is rounded to 8 bits
        if `rounding` says how."""
        options = {"eps": self.eps, "rounding": rounding, "implementation": implementation}
        return add_norm(x, addend, self.scale, **options)

    def after_exchanging(
        self,
        x: Float[Array, "*tokens {self.axis.size}"],
        own_parts: Float[Array, "parts *tokens {self.axis.size}"],
        inboxes: Inboxes,
        implementation: Implementation,
    ) -> tuple[
        Float[Array, "*tokens {self.axis.size}"], Float[Array, "*tokens {self.axis.size}"], Inboxes
    ]:
        """`x` plus the sum of all devices' products, the norm of that, and the inboxes afterwards.
        This device's product is given in parts."""
        return exchange_norm(
            x,
            own_parts,
            self.scale,
            inboxes,
            eps=self.eps,
            axis_name=AXIS,
            implementation=implementation,
        )
