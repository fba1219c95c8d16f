"""The pre-norm decoder layer that the target and the drafter share."""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxspec.layers.axes import Axis, Fused, size_of
from jaxspec.layers.convolution import Convolution, Convolutions
from jaxspec.layers.fp8 import Fp8, Fp8Linear, Matrix, matrix
from jaxspec.layers.linear import RMSNorm
from jaxspec.layers.rope import Rope
from jaxspec.layers.shards import WHOLE, Shards
from pallas_kernels.dispatch import Implementation
from pallas_kernels.fp8_product import RoundedRows


@dataclasses.dataclass(frozen=True)
class Decoder:
    """The sizes of a stack of decoder layers, or of one device's shard of it. Target and drafter
    have one each."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    max_position_embeddings: int
    head_norms: bool = True
    """Whether every query and key head is normed before it is rotated."""
    wide_norms: bool = False
    """Whether the scales of norms are float32 in a model of any dtype."""
    fp8: Fp8 | None = None
    """How the layers' matrices are stored in 8 bits; None if they have the dtype of the model."""

    shards: Shards = WHOLE
    """Over how many devices heads and the MLP's inner axis are cut. Their sizes are those of one
    device's shard."""

    def of_shard(self, shards: Shards) -> "Decoder":
        """One device's shard of a whole decoder."""
        return dataclasses.replace(
            self,
            intermediate_size=self.intermediate_size // shards.count,
            num_heads=self.num_heads // shards.count,
            num_kv_heads=self.num_kv_heads // shards.count,
            shards=shards,
        )

    def with_kernels(self, implementation: Implementation) -> "Decoder":
        """The same decoder, whose 8-bit matrices are multiplied by this implementation."""
        if self.fp8 is None:
            return self
        fp8 = dataclasses.replace(self.fp8, implementation=implementation)
        return dataclasses.replace(self, fp8=fp8)

    def with_quantised_inputs(self) -> "Decoder":
        """The same decoder, whose 8-bit matrices multiply inputs that are rounded to 8 bits."""
        assert self.fp8 is not None, "the matrices are not in 8 bits"
        fp8 = dataclasses.replace(self.fp8, quantised_inputs=True)
        return dataclasses.replace(self, fp8=fp8)

    @property
    def rotated(self) -> int:
        """Dimensions of a head that are rotated."""
        return self.head_dim if self.rope.rotated is None else self.rope.rotated

    def norm_dtype(self, dtype: DTypeLike) -> DTypeLike:
        """The dtype of the scales of norms in a model of this dtype."""
        return jnp.float32 if self.wide_norms else dtype

    @property
    def hidden(self) -> Axis:
        return Axis("hidden", self.hidden_size)

    @property
    def inner(self) -> Axis:
        """The MLP's inner axis."""
        return Axis("inner", self.intermediate_size, shards=self.shards)

    @property
    def attended(self) -> Axis:
        """The output of attention: the numbers of all heads, one head after the other."""
        return Axis("heads", self.num_heads * self.head_dim, self.head_dim, self.shards)

    @property
    def fused(self) -> Fused:
        """The input of attention: query heads, key heads, value heads."""
        size = self.num_kv_heads * self.head_dim
        kv_heads = Axis("kv_heads", size, self.head_dim, self.shards)
        return self.attended, kv_heads, kv_heads


@dataclasses.dataclass(frozen=True)
class BlockMask:
    """Which positions of the block and of the context a token of the block attends to."""

    causal: bool
    """Whether a token attends only to the block's tokens up to itself, or to the whole block."""
    window: int | None = None
    """Distance below which positions are visible; None if all positions are."""
    window_of_block: bool = False
    """Whether the window belongs to the block instead of each of its tokens: all of them see the
    `window` positions before the block, and the window hides nothing of the block."""


@runtime_checkable
class Attending[Memory](Protocol):
    """How attention is computed: over the pages of a cache, or over whole sequences in training."""

    def __call__(
        self, attention: "Attention", qkv: Float[Array, "batch width fused"], memory: Memory, /
    ) -> tuple[Float[Array, "batch width attended"], Memory]:
        """`qkv` is the output of the projection, whose heads are neither normed nor rotated yet.
        `memory` is the layer's cache, which is returned with the block in it."""
        ...


@runtime_checkable
class AttendingBlocks[Memory](Attending[Memory], Protocol):
    """Attention that also knows where the blocks begin, which convolutions need."""

    def by_block(
        self, tokens: Float[Array, "batch tokens outputs"]
    ) -> Float[Array, "*blocks width outputs"]:
        """The tokens with an axis along each block."""
        ...


@runtime_checkable
class Mixer(Protocol):
    """The part of a layer before its MLP, and the only part in which a token sees other tokens:

    x -- norm -- projection -- mix -- out -- added to x
    """

    @property
    def norm(self) -> RMSNorm: ...

    @property
    def projection(self) -> Matrix: ...

    @property
    def out(self) -> Matrix: ...

    @property
    def scopes(self) -> tuple[str, str]:
        """The names of the two products in profiles."""
        ...

    def mix_parts(
        self, parts: Float[Array, "parts filled width outputs"], way: Any, memory: Any, /
    ) -> tuple[Float[Array, "filled width attended"] | RoundedRows, Any]:
        """The input of `out`, from the projection given in parts, and the memory with the block.
        The input may be rounded to 8 bits already if `out` wants that. `way` is how a token sees
        others: attention over pages or a recurrence over states. `parts` may have more requests
        than the block; the results for the surplus ones are meaningless."""
        ...


class Attention(nn.Module):
    """Grouped query attention; how queries attend is passed in."""

    geometry: Decoder
    mask: BlockMask
    dtype: DTypeLike

    scopes = "qkv", "attention_out"

    def setup(self) -> None:
        g = self.geometry
        head, norms = Axis("head_dim", g.head_dim), g.norm_dtype(self.dtype)
        self.norm = RMSNorm(g.hidden, g.rms_norm_eps, norms)
        self.qkv = matrix(self.inputs, self.outputs, self.dtype, g.fp8)
        if g.head_norms:
            self.q_norm = RMSNorm(head, g.rms_norm_eps, norms)
            self.k_norm = RMSNorm(head, g.rms_norm_eps, norms)
        self.out = matrix(g.attended, g.hidden, self.dtype, g.fp8)

    @property
    def inputs(self) -> Axis:
        """The projection's input axis."""
        return self.geometry.hidden

    @property
    def outputs(self) -> Fused:
        """The projection's output axis: queries, keys and values."""
        return self.geometry.fused

    def __call__[Memory](
        self, x: Float[Array, "batch width hidden"], attend: Attending[Memory], memory: Memory
    ) -> tuple[Float[Array, "batch width hidden"], Memory]:
        with jax.named_scope("qkv"):
            projected = self.qkv(self.norm(x))
        mixed, memory = self.mix(projected, attend, memory)
        with jax.named_scope("attention_out"):
            return self.out(mixed), memory

    def mix[Memory](
        self,
        projected: Float[Array, "filled width outputs"],
        attend: Attending[Memory],
        memory: Memory,
    ) -> tuple[Float[Array, "filled width attended"], Memory]:
        """The input of `out`, from the projection, and the memory with the block in it."""
        return attend(self, projected, memory)

    @property
    def projection(self) -> Matrix:
        return self.qkv

    def mix_parts(
        self, parts: Float[Array, "parts filled width outputs"], attend: Any, memory: Any
    ) -> tuple[Float[Array, "filled width attended"] | RoundedRows, Any]:
        return attend.of_parts(self, parts, memory, self.out.rounding)

    def keys_values(
        self, context: Float[Array, "*tokens hidden"]
    ) -> Float[Array, "*tokens key_values"]:
        """Keys and values of tokens that have no queries. The input is not normed here."""
        return self._keys_values_of(self.qkv.columns(context, start=1))

    def keys_values_in_parts(
        self, context: Float[Array, "*tokens hidden"], implementation: Implementation
    ) -> Float[Array, "parts *tokens key_values"]:
        """The same as parts whose sum is left to the kernel that reads it."""
        return self._keys_values_of(self.qkv.columns_in_parts(context, 1, implementation))

    def _keys_values_of(
        self, after_queries: Float[Array, "*tokens outputs"]
    ) -> Float[Array, "*tokens key_values"]:
        """What is left of a product without queries if the projection has more after the values."""
        return after_queries[..., : size_of(self.geometry.fused[1:])]


class MLP(nn.Module):
    """A SiLU-gated MLP whose gate and up projections are fused."""

    geometry: Decoder
    dtype: DTypeLike

    def setup(self) -> None:
        g = self.geometry
        self.norm = RMSNorm(g.hidden, g.rms_norm_eps, g.norm_dtype(self.dtype))
        self.gate_up = matrix(g.hidden, (g.inner, g.inner), self.dtype, g.fp8)
        self.down = matrix(g.inner, g.hidden, self.dtype, g.fp8)

    def __call__(self, x: Float[Array, "batch width hidden"]) -> Float[Array, "batch width hidden"]:
        with jax.named_scope("gate_up"):
            gated = self.gated(self.norm(x))
        with jax.named_scope("down"):
            return self.down(gated)

    def gated(
        self, normed: Float[Array, "batch width hidden"]
    ) -> Float[Array, "batch width inner"]:
        gate, up = jnp.split(self.gate_up(normed), 2, axis=-1)
        return jax.nn.silu(gate) * up

    def gated_for_down(
        self,
        normed: Float[Array, "batch width hidden"] | RoundedRows,
        implementation: Implementation,
    ) -> Float[Array, "batch width inner"] | RoundedRows:
        """The same as `gated`, from an input of `gate_up.in_parts` to one of `down.in_parts`."""
        if self.down.rounding is None:
            assert not isinstance(normed, RoundedRows), "both matrices want the same"
            return self.gated(normed)
        assert isinstance(self.gate_up, Fp8Linear), "both matrices are in 8 bits"
        return self.gate_up.gated(normed, self.down.rounding, implementation)


class DecoderLayer(nn.Module):
    """Attention, then MLP, each with a norm before it and added to the residual stream.

    x --+-----------------------+--+------------------------------+-- x
        norm, qkv, attend, out -^  norm, gate and up, SiLU, down -^

    A layer with convolutions has one after each norm and one before each sum.
    """

    geometry: Decoder
    mask: BlockMask
    dtype: DTypeLike = jnp.float32
    convolutions: Convolutions | None = None

    def setup(self) -> None:
        self.attention = Attention(self.geometry, self.mask, self.dtype)
        self.mlp = MLP(self.geometry, self.dtype)
        if self.convolutions is not None:
            around = self.convolutions, self.geometry.hidden, self.dtype
            self.attention_convolution = Convolution(*around)
            self.mlp_convolution = Convolution(*around)

    @property
    def mixer(self) -> Attention:
        return self.attention

    def __call__(
        self, x: Float[Array, "batch width hidden"], attend: Attending[Any], memory: Any
    ) -> tuple[Float[Array, "batch width hidden"], Any]:
        """The residual stream after the layer, and the layer's new cache."""
        if self.convolutions is not None:
            assert isinstance(attend, AttendingBlocks), "convolutions need to know the blocks"
            return self.convolved(x, attend, memory)
        attended, memory = self.attention(x, attend, memory)
        x = x + attended
        return x + self.mlp(x), memory

    def convolved(
        self, x: Float[Array, "batch width hidden"], attend: AttendingBlocks[Any], memory: Any
    ) -> tuple[Float[Array, "batch width hidden"], Any]:
        attention, mlp = self.attention, self.mlp
        with jax.named_scope("qkv"):
            normed, after = self.attention_convolution(attention.norm(x), attend.by_block)
            qkv = attention.qkv(normed)
        attended, memory = attend(attention, qkv, memory)
        with jax.named_scope("attention_out"):
            x = x + after(attention.out(attended))
        with jax.named_scope("gate_up"):
            normed, after = self.mlp_convolution(mlp.norm(x), attend.by_block)
            gated = mlp.gated(normed)
        with jax.named_scope("down"):
            return x + after(mlp.down(gated)), memory
