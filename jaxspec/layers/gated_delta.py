"""The recurrent mixer of Qwen3.5's linear layers: a gated delta rule behind a short convolution.

    x - norm - inputs -+- q k v - convolution, SiLU -+- delta rule - norm of heads -+- times - out
                       +- decay, beta ---------------+                              |
                       +- gate, SiLU -----------------------------------------------+

The convolution sees the last `taps` tokens, channel by channel. The delta rule's state is in
`pallas_kernels.gated_delta`; where states are, and how a block meets them, is passed in.
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
    """Tokens that one output of the convolution is made of."""
    shards: Shards = WHOLE
    """On how many devices heads are cut, each key head with the value heads that it serves. Then
    the numbers of heads are those of one device's shard."""

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
        """What the layer makes of a token: queries, keys, values, gates, betas, decays."""
        return *self.channels, self.values, self.heads, self.heads


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeltaRows:
    """A block of tokens behind the convolution."""

    query: Float[Array, "batch width key_heads key_dim"]
    key: Float[Array, "batch width key_heads key_dim"]
    value: Float[Array, "batch width value_heads value_dim"]


@runtime_checkable
class Recurring[Memory](Protocol):
    """How the delta rule is computed: over the states of a cache, or over whole sequences."""

    def __call__(
        self,
        mixer: "GatedDelta",
        mixed: Float[Array, "batch width channels"],
        log_decay: Float[Array, "batch width value_heads"],
        beta: Float[Array, "batch width value_heads"],
        memory: Memory,
        /,
    ) -> tuple[Float[Array, "batch width value_heads value_dim"], Memory]:
        """`mixed` is what the convolution reads. `memory` is the layer's cache, and is returned
        with the block in it."""
        ...


class GatedDelta(nn.Module):
    """The mixer; how the recurrence meets its states is passed in."""

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
        """From the projection to what `out` reads, and the memory with the block."""
        sizes = self.sizes
        with jax.named_scope("delta"):
            values, heads = sizes.values.size, sizes.value_heads
            channels = size_of(sizes.channels)
            ends = [channels, channels + values, inputs.shape[-1] - heads]
            mixed, gate, beta, decay = jnp.split(inputs, ends, axis=-1)
            decay = jax.nn.softplus(decay.astype(jnp.float32) + self.decay_bias)
            log_decay = -jnp.exp(self.log_rate) * decay
            beta = jax.nn.sigmoid(beta.astype(jnp.float32))
            outputs, memory = recur(self, mixed, log_decay, beta, memory)
            return self.gated(outputs, gate), memory

    def rows(
        self,
        before: Float[Array, "batch recent channels"],
        mixed: Float[Array, "batch width channels"],
    ) -> DeltaRows:
        """The block behind the convolution; `before` are its inputs just before the block."""
        sizes = self.sizes
        convolved = convolve(joined(before, mixed), self.taps)
        keys = sizes.key_heads * sizes.key_dim
        query, key, value = jnp.split(convolved, [keys, 2 * keys], axis=-1)
        by_head = lambda x, heads: x.reshape(*x.shape[:2], heads, -1)
        return DeltaRows(
            by_head(query, sizes.key_heads),
            by_head(key, sizes.key_heads),
            by_head(value, sizes.value_heads),
        )

    def gated(
        self,
        outputs: Float[Array, "batch width value_heads value_dim"],
        gate: Float[Array, "batch width attended"],
    ) -> Float[Array, "batch width attended"]:
        """Each head normed, then gated. Everything is float32 until the end."""
        gate = jax.nn.silu(gate.astype(jnp.float32))
        normed = self.output_norm(outputs.astype(jnp.float32))
        return (normed.reshape(gate.shape) * gate).astype(self.dtype)


def joined(
    before: Float[Array, "batch recent channels"], mixed: Float[Array, "batch width channels"]
) -> Float[Array, "batch positions channels"]:
    """One behind the other, as a choice that becomes part of the kernel that reads it. A
    concatenation would be a kernel of its own, which writes all of it."""
    recent, width = before.shape[1], mixed.shape[1]
    is_before = jnp.arange(recent + width)[:, None] < recent
    padded = lambda x, first, last: jnp.pad(x, ((0, 0), (first, last), (0, 0)))
    return jnp.where(is_before, padded(before, 0, width), padded(mixed, recent, 0))


def convolve(
    inputs: Float[Array, "batch positions channels"], taps: Float[Array, "taps channels"]
) -> Float[Array, "batch width channels"]:
    """SiLU of each token's sum over itself and the tokens before it, in float32. There are as many
    outputs as inputs have as many before them."""
    count = taps.shape[0]
    width = inputs.shape[1] - count + 1
    wide = jnp.promote_types(inputs.dtype, jnp.float32)
    terms = [inputs[:, i : i + width].astype(wide) * taps[i].astype(wide) for i in range(count)]
    return jax.nn.silu(sum(terms[1:], terms[0])).astype(inputs.dtype)


def mostly_now(key: Key[Array, ""], shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Taps that mostly see the token itself."""
    drawn = jax.random.uniform(key, shape, jnp.float32, -0.3, 0.3)
    return drawn.at[-1].add(1).astype(dtype)


def slow(key: Key[Array, ""], shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Rates and biases with which a state keeps between a third and nearly all of itself."""
    return jax.random.uniform(key, shape, dtype, -3.0, 0.0)
