"""The pre-norm decoder layer that the target and the drafter share."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxspec.cache.block import Block
from jaxspec.cache.keys_values import KeysValues
from jaxspec.layers.linear import Linear, RMSNorm
from jaxspec.layers.rope import Rope
from pallas_kernels import dense_chain, paged_attention, qkv_write
from pallas_kernels.dense_chain import ChainShape, Meetings, dense_chain_runs
from pallas_kernels.dispatch import Implementation

Rotation = tuple[Float[Array, "batch width half"], Float[Array, "batch width half"]]


@dataclasses.dataclass(frozen=True)
class Decoder:
    """The stack of decoder layers that target and drafter both have, each with its own numbers."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    max_position_embeddings: int


@dataclasses.dataclass(frozen=True)
class BlockMask:
    """What a row of the block sees of the block and of the context."""

    causal: bool
    """Whether it sees only block rows up to itself; if not, it sees the whole block."""
    window: int | None = None
    """Distance below which positions are visible; None sees everything."""


class Attention(nn.Module):
    """Grouped query attention over pages, with normed heads."""

    geometry: Decoder
    mask: BlockMask
    dtype: DTypeLike
    implementation: Implementation

    def setup(self) -> None:
        g = self.geometry
        heads = g.num_heads + 2 * g.num_kv_heads
        self.norm = RMSNorm(g.hidden_size, g.rms_norm_eps, self.dtype)
        self.qkv = Linear(g.hidden_size, heads * g.head_dim, self.dtype)
        self.q_norm = RMSNorm(g.head_dim, g.rms_norm_eps, self.dtype)
        self.k_norm = RMSNorm(g.head_dim, g.rms_norm_eps, self.dtype)
        self.out = Linear(g.num_heads * g.head_dim, g.hidden_size, self.dtype)

    def __call__(
        self,
        qkv: Float[Array, "parts more width fused"],
        rotation: Rotation,
        block: Block,
        cache: KeysValues,
    ) -> tuple[Float[Array, "more width attended"], KeysValues]:
        """`qkv` may have more slots than the block; what is made of those means nothing."""
        with jax.named_scope("qkv_write"):
            query, keys, values = qkv_write(
                qkv,
                self.q_norm.scale,
                self.k_norm.scale,
                *rotation,
                block.cells,
                cache.keys,
                cache.values,
                eps=self.geometry.rms_norm_eps,
                implementation=self.implementation,
            )
        with jax.named_scope("attention"):
            attended = paged_attention(
                query,
                keys,
                values,
                block.page_table,
                block.lengths,
                block.counts,
                causal=self.mask.causal,
                window=self.mask.window,
                out_slots=qkv.shape[1],
                implementation=self.implementation,
            )
        return attended.reshape(*attended.shape[:2], -1), KeysValues(keys, values)

    def write_context(
        self,
        context: Float[Array, "batch width hidden"],
        rotation: Rotation,
        block: Block,
        cache: KeysValues,
    ) -> KeysValues:
        """Writes keys and values of tokens that are never queried (and not normed)."""
        g = self.geometry
        key_values = self.qkv.columns(context, start=g.num_heads * g.head_dim)
        _, keys, values = qkv_write(
            key_values[None],
            None,
            self.k_norm.scale,
            *rotation,
            block.cells,
            cache.keys,
            cache.values,
            eps=g.rms_norm_eps,
            implementation=self.implementation,
        )
        return KeysValues(keys, values)


class MLP(nn.Module):
    """SiLU-gated, gate and up projection fused."""

    geometry: Decoder
    dtype: DTypeLike
    implementation: Implementation

    def setup(self) -> None:
        g = self.geometry
        self.norm = RMSNorm(g.hidden_size, g.rms_norm_eps, self.dtype)
        self.gate_up = Linear(g.hidden_size, 2 * g.intermediate_size, self.dtype)
        self.down = Linear(g.intermediate_size, g.hidden_size, self.dtype)

    def __call__(
        self, normed: Float[Array, "batch width hidden"]
    ) -> Float[Array, "parts batch width hidden"]:
        with jax.named_scope("gate_up"):
            gate, up = jnp.split(self.gate_up(normed), 2, axis=-1)
        with jax.named_scope("down"):
            return self.down.in_parts(jax.nn.silu(gate) * up, self.implementation)


Handed = tuple[
    Float[Array, "batch width hidden"], Float[Array, "parts batch width outputs"], Meetings
]
"""From layer to layer: the residual stream, what the following made of it (the next qkv, or the
last norm), and where kernels met."""


@dataclasses.dataclass(frozen=True)
class Following:
    """What reads the residual stream after a layer."""

    norm: RMSNorm
    """The next layer's, or the last one."""
    qkv: Linear | None
    """The next layer's; none after the last layer."""


class DecoderLayer(nn.Module):
    """Attention, then MLP, each added to the residual stream.

    From one attention to the next there are matrices and what happens to single rows, and no
    positions. So a layer is called from there to there, and one kernel can do it all:

        x ----------+----------------------+------ x of the next layer
                    ^ out          norm    ^ down           norm, its qkv
        qkv -- attention            gate, up  ----------------------------- qkv of the next layer
    """

    geometry: Decoder
    mask: BlockMask
    dtype: DTypeLike = jnp.float32
    implementation: Implementation = "auto"

    def setup(self) -> None:
        self.attention = Attention(self.geometry, self.mask, self.dtype, self.implementation)
        self.mlp = MLP(self.geometry, self.dtype, self.implementation)

    @property
    def entrance(self) -> Following:
        return Following(self.attention.norm, self.attention.qkv)

    def to_next(
        self,
        x: Float[Array, "batch width hidden"],
        attended: Float[Array, "batch width attended"],
        following: Following,
        meetings: Meetings,
    ) -> Handed:
        if self.chains(x.shape[0] * x.shape[1]):
            return self.chain(x, attended, following, meetings)
        with jax.named_scope("attention_out"):
            attended = self.attention.out.in_parts(attended, self.implementation)
        with jax.named_scope("gate_up"):
            x, normed = self.mlp.norm.after_adding(x, attended, self.implementation)
        added = self.mlp(normed)
        with jax.named_scope("qkv"):
            x, normed = following.norm.after_adding(x, added, self.implementation)
            if following.qkv is None:
                return x, normed[None], meetings
            return x, following.qkv.in_parts(normed, self.implementation), meetings

    def chains(self, rows: int) -> bool:
        """Whether one kernel can do all of `to_next` for so many rows."""
        g = self.geometry
        shape = ChainShape(
            rows,
            g.num_heads * g.head_dim,
            g.hidden_size,
            g.intermediate_size,
            (g.num_heads + 2 * g.num_kv_heads) * g.head_dim,
        )
        return dense_chain_runs(shape, self.dtype, self.implementation)

    def chain(
        self,
        x: Float[Array, "batch width hidden"],
        attended: Float[Array, "batch width attended"],
        following: Following,
        meetings: Meetings,
    ) -> Handed:
        with jax.named_scope("dense"):
            total, qkv, meetings = dense_chain(
                attended.reshape(-1, attended.shape[-1]),
                x.reshape(-1, x.shape[-1]),
                self.attention.out.kernel,
                self.mlp.norm.scale,
                self.mlp.gate_up.kernel,
                self.mlp.down.kernel,
                following.norm.scale,
                None if following.qkv is None else following.qkv.kernel,
                meetings,
                eps=self.geometry.rms_norm_eps,
                implementation=self.implementation,
            )
            total = total.reshape(x.shape)
            if qkv is None:
                return total, following.norm(total)[None], meetings
            return total, qkv.reshape(1, *x.shape[:2], qkv.shape[-1]), meetings
