"""The recurrent mixer of Qwen3.5's linear layers: a gated delta rule behind a short convolution.

    x - norm - inputs -+- q k v - convolution, SiLU -+- delta rule - norm of heads -+- times - out
                       +- decay, beta ---------------+                              |
                       +- gate, SiLU -----------------------------------------------+

The convolution sees the last `taps` tokens, channel by channel. The delta rule is explained in
`pallas_kernels.gated_delta`. Where the states are, and how a block reads them, is passed in.
"""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key

from jaxspec.layers.axes import Axis, Fused, size_of
from jaxspec.layers.decoder import Decoder
from jaxspec.layers.fp8 import Matrix, matrix
from jaxspec.layers.linear import RMSNorm
from jaxspec.layers.parameter import parameter
from jaxspec.layers.shards import WHOLE, Shards
from pallas_kernels.dispatch import Implementation, kernels_meant
from pallas_kernels.gated_delta.api import BLOCK_READ
from pallas_kernels.gated_delta.block_form import OF_HEAD, WIDEST, gated
from pallas_kernels.gated_delta.projection import Recurrent, recurrent_rows
from pallas_kernels.split_product import total_of

FLOAT32 = ("decay_bias", "log_rate")
"""Parameters that are float32 in a model of any dtype."""


@dataclasses.dataclass(frozen=True)
class DeltaSizes:
    """The sizes of a recurrent mixer, or of one device's shard of it."""

    key_heads: int
    """Heads of queries and keys, each of which serves several value heads."""
    value_heads: int
    """Heads of values and states."""
    key_dim: int
    value_dim: int
    taps: int
    """Number of tokens that one output of the convolution is made of."""
    shards: Shards = WHOLE
    """Over how many devices heads are cut, each key head with the value heads that it serves. The
    numbers of heads are those of one device's shard."""

    def of_shard(self, shards: Shards) -> "DeltaSizes":
        """One device's shard of a whole mixer."""
        return dataclasses.replace(
            self,
            key_heads=self.key_heads // shards.count,
            value_heads=self.value_heads // shards.count,
            shards=shards,
        )

    @property
    def channels(self) -> Fused:
        """Queries, keys and values beside each other, as the convolution sees them."""
        keys = Axis("key_heads", self.key_heads * self.key_dim, self.key_dim, self.shards)
        return keys, keys, self.values

    @property
    def values(self) -> Axis:
        size = self.value_heads * self.value_dim
        return Axis("value_heads", size, self.value_dim, self.shards)

    @property
    def heads(self) -> Axis:
        """One number for each value head."""
        return Axis("value_heads", self.value_heads, shards=self.shards)

    @property
    def inputs(self) -> Fused:
        """What the layer projects a token to: queries, keys, values, gates, betas, decays."""
        return *self.channels, self.values, self.heads, self.heads


@runtime_checkable
class Recurring[Memory](Protocol):
    """How the delta rule is computed: over the states of a cache, or over whole sequences."""

    def __call__(
        self,
        mixer: "GatedDelta",
        inputs: Float[Array, "batch width outputs"],
        memory: Memory,
        /,
    ) -> tuple[Float[Array, "batch width attended"], Memory]:
        """The outputs of the rule, normed and gated. `inputs` are the layer's projection of its
        tokens (`DeltaSizes.inputs`). `memory` is the layer's cache, which is returned with the
        block in it."""
        ...


class GatedDelta(nn.Module):
    """The mixer. How the recurrence reads its states is passed in."""

    geometry: Decoder
    sizes: DeltaSizes
    dtype: DTypeLike

    scopes = "delta_inputs", "delta_out"

    def setup(self) -> None:
        g, sizes = self.geometry, self.sizes
        taps, heads = Axis("taps", sizes.taps), sizes.heads
        norms = g.norm_dtype(self.dtype)
        self.norm = RMSNorm(g.hidden, g.rms_norm_eps, norms)
        self.inputs = matrix(g.hidden, sizes.inputs, self.dtype, g.fp8)
        self.taps = parameter(self, "taps", mostly_now, (taps, sizes.channels), self.dtype)
        self.decay_bias = parameter(self, "decay_bias", slow, (heads,), jnp.float32)
        self.log_rate = parameter(self, "log_rate", slow, (heads,), jnp.float32)
        self.output_norm = RMSNorm(Axis("value_dim", sizes.value_dim), g.rms_norm_eps, norms)
        self.out = matrix(sizes.values, g.hidden, self.dtype, g.fp8)

    def __call__(
        self, x: Float[Array, "batch width hidden"], recur: Recurring[Any], memory: Any
    ) -> tuple[Float[Array, "batch width hidden"], Any]:
        with jax.named_scope("delta_inputs"):
            inputs = self.inputs(self.norm(x))
        mixed, memory = self.mix(inputs, recur, memory)
        with jax.named_scope("delta_out"):
            return self.out(mixed), memory

    @property
    def projection(self) -> Matrix:
        return self.inputs

    def mix_parts(
        self, parts: Float[Array, "parts filled width outputs"], recur: Any, memory: Any
    ) -> tuple[Float[Array, "filled width attended"], Any]:
        inputs = total_of(parts, self.dtype)
        mixed, memory = self.mix(inputs[: recur.batch], recur, memory)
        return jnp.pad(mixed, ((0, len(inputs) - recur.batch), (0, 0), (0, 0))), memory

    def mix(
        self, inputs: Float[Array, "batch width outputs"], recur: Recurring[Any], memory: Any
    ) -> tuple[Float[Array, "batch width attended"], Any]:
        """The input of `out`, from the projection, and the memory with the block in it."""
        with jax.named_scope("delta"):
            return recur(self, inputs, memory)

    def rows(
        self,
        before: Float[Array, "batch recent channels"],
        inputs: Float[Array, "batch width outputs"],
    ) -> Recurrent:
        """The block as the delta rule takes it. `before` are the convolution's inputs just before
        the block."""
        sizes = self.sizes.key_dim, self.sizes.value_dim
        return recurrent_rows(inputs, before, *self.of_rows, *sizes)

    @property
    def of_rows(self) -> tuple[Array, Array, Array]:
        """The parameters that rows are made with."""
        return self.taps, self.decay_bias, self.log_rate

    def gated(
        self,
        outputs: Float[Array, "batch width value_heads value_dim"],
        inputs: Float[Array, "batch width outputs"],
    ) -> Float[Array, "batch width attended"]:
        """Each head normed, then multiplied by SiLU of the gates in the projection."""
        first, values = size_of(self.sizes.channels), self.sizes.values.size
        gates = inputs[..., first : first + values]
        norm = self.output_norm
        return gated(outputs, gates, norm.scale, norm.eps).reshape(gates.shape)


def in_block_form(implementation: Implementation, inputs: Any, *others: Any) -> bool:
    """Whether a block is read and folded in matrix products (`block_read`) instead of row by row:
    if it has more than one row and at most `WIDEST`, and if the kernel, should kernels run, can."""
    if not 1 < inputs.shape[1] <= WIDEST:
        return False
    kernels = kernels_meant(implementation)
    return kernels is None or BLOCK_READ.refusal(implementation, kernels, inputs, *others) is None


def corrected_shapes(
    sizes: DeltaSizes, dtype: DTypeLike, batch: int, width: int
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """What `block_read` leaves for `block_fold`: keys, corrections, and sums of the log decays."""
    keys, values = sizes.channels[0].size, sizes.values.size
    return (
        jax.ShapeDtypeStruct((batch, width, keys), dtype),
        jax.ShapeDtypeStruct((batch, width, values), jnp.float32),
        jax.ShapeDtypeStruct((batch, 1, sizes.value_heads * OF_HEAD), jnp.float32),
    )


def mostly_now(key: Key[Array, ""], shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Taps that mostly see the token itself."""
    drawn = jax.random.uniform(key, shape, jnp.float32, -0.3, 0.3)
    return drawn.at[-1].add(1).astype(dtype)


def slow(key: Key[Array, ""], shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Rates and biases with which a token leaves between a third and nearly all of a state."""
    return jax.random.uniform(key, shape, dtype, -3.0, 0.0)
