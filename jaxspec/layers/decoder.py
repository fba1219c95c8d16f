"""The pre-norm decoder layer that the target and the drafter share."""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxspec.layers.axes import Axis, Fused
from jaxspec.layers.linear import Linear, RMSNorm
from jaxspec.layers.rope import Rope


@dataclasses.dataclass(frozen=True)
class Decoder:
    """The sizes of a stack of decoder layers. Target and drafter have one each."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    max_position_embeddings: int

    @property
    def hidden(self) -> Axis:
        return Axis("hidden", self.hidden_size)

    @property
    def inner(self) -> Axis:
        """The MLP's inner axis."""
        return Axis("inner", self.intermediate_size)

    @property
    def attended(self) -> Axis:
        """The output of attention: the numbers of all heads, one head after the other."""
        return Axis("heads", self.num_heads * self.head_dim, self.head_dim)

    @property
    def fused(self) -> Fused:
        """The input of attention: query heads, key heads, value heads."""
        kv_heads = Axis("kv_heads", self.num_kv_heads * self.head_dim, self.head_dim)
        return self.attended, kv_heads, kv_heads


@dataclasses.dataclass(frozen=True)
class BlockMask:
    """Which positions of the block and of the context a token of the block attends to."""

    causal: bool
    """Whether a token attends only to the block's tokens up to itself, or to the whole block."""
    window: int | None = None
    """Distance below which positions are visible; None if all positions are."""


@runtime_checkable
class Attending[Memory](Protocol):
    """How attention is computed: over the pages of a cache, or over whole sequences in training."""

    def __call__(
        self, attention: "Attention", qkv: Float[Array, "batch width fused"], memory: Memory, /
    ) -> tuple[Float[Array, "batch width attended"], Memory]:
        """`qkv` is the output of the projection, with heads neither normed nor rotated. `memory` is
        the layer's cache, and is returned with the block in it."""
        ...


class Attention(nn.Module):
    """Grouped query attention with normed heads; how queries attend is passed in."""

    geometry: Decoder
    mask: BlockMask
    dtype: DTypeLike

    def setup(self) -> None:
        g = self.geometry
        head = Axis("head_dim", g.head_dim)
        self.norm = RMSNorm(g.hidden, g.rms_norm_eps, self.dtype)
        self.qkv = Linear(g.hidden, g.fused, self.dtype)
        self.q_norm = RMSNorm(head, g.rms_norm_eps, self.dtype)
        self.k_norm = RMSNorm(head, g.rms_norm_eps, self.dtype)
        self.out = Linear(g.attended, g.hidden, self.dtype)

    def __call__[Memory](
        self, x: Float[Array, "batch width hidden"], attend: Attending[Memory], memory: Memory
    ) -> tuple[Float[Array, "batch width hidden"], Memory]:
        with jax.named_scope("qkv"):
            qkv = self.qkv(self.norm(x))
        attended, memory = attend(self, qkv, memory)
        with jax.named_scope("attention_out"):
            return self.out(attended), memory

    def keys_values(
        self, context: Float[Array, "*tokens hidden"]
    ) -> Float[Array, "*tokens key_values"]:
        """Keys and values of tokens that have no queries. The input is not normed here."""
        return self.qkv.columns(context, start=1)


class MLP(nn.Module):
    """A SiLU-gated MLP whose gate and up projections are fused."""

    geometry: Decoder
    dtype: DTypeLike

    def setup(self) -> None:
        g = self.geometry
        self.norm = RMSNorm(g.hidden, g.rms_norm_eps, self.dtype)
        self.gate_up = Linear(g.hidden, (g.inner, g.inner), self.dtype)
        self.down = Linear(g.inner, g.hidden, self.dtype)

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


class DecoderLayer(nn.Module):
    """Attention, then MLP, each with a norm before it and added to the residual stream.

    x --+-----------------------+--+------------------------------+-- x
        norm, qkv, attend, out -^  norm, gate and up, SiLU, down -^
    """

    geometry: Decoder
    mask: BlockMask
    dtype: DTypeLike = jnp.float32

    def setup(self) -> None:
        self.attention = Attention(self.geometry, self.mask, self.dtype)
        self.mlp = MLP(self.geometry, self.dtype)

    def __call__(
        self, x: Float[Array, "batch width hidden"], attend: Attending[Any], memory: Any
    ) -> tuple[Float[Array, "batch width hidden"], Any]:
        """The residual stream after the layer, and the layer's new cache."""
        attended, memory = self.attention(x, attend, memory)
        x = x + attended
        return x + self.mlp(x), memory
