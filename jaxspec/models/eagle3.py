"""The EAGLE-3 drafter: rows that pair a position's feature with the token after it.

    row i            feature of position i, embedding of the token at position i + 1
                     norm, norm, side by side --> first layer --> other layers --> norm --> head
    its logits       the token at position i + 2
    chain            the next row has this row's hidden state in the place of a feature

A feature is the target's hidden states after some of its layers, by default three, projected to one
vector. The drafter's cache holds keys and values of rows, row i in the cell of position i.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxspec.cache.block import Block, one_token
from jaxspec.cache.cache import Cache
from jaxspec.cache.keys_values import KeysValues
from jaxspec.layers.axes import Axis
from jaxspec.layers.decoder import MLP, Attending, Attention, BlockMask, Decoder, DecoderLayer
from jaxspec.layers.kernels import (
    OpChoice,
    StackShape,
    choices_of_attention,
    choices_of_context,
    choices_of_sums,
)
from jaxspec.layers.linear import Linear, RMSNorm
from jaxspec.layers.paged import Paged, paged
from jaxspec.layers.sums import OF_PAIRS
from jaxspec.models.drafter import DrafterModule
from jaxspec.models.eagle3_config import Eagle3Config

Hidden = Float[Array, "batch width hidden"]
CAUSAL = BlockMask(causal=True)


class PairAttention(Attention):
    """Attention whose queries, keys and values are made of an embedding and a hidden state."""

    def setup(self) -> None:
        super().setup()
        g = self.geometry
        self.hidden_norm = RMSNorm(g.hidden, g.rms_norm_eps, self.dtype)

    @property
    def inputs(self) -> Axis:
        return Axis("hidden", 2 * self.geometry.hidden_size)

    def joined(
        self, embedded: Hidden, normed: Hidden
    ) -> Float[Array, "batch width {self.inputs.size}"]:
        """The embedding, which is normed here, beside the hidden state, which is normed already."""
        return jnp.concatenate([self.norm(embedded), normed], axis=-1)


class PairLayer(nn.Module):
    """The first layer.

    embedding    -- norm --+
                           +-- qkv, attend, out --+--+-- norm, MLP --+-- x
    hidden state -- norm --+----------------------^  +---------------^
    """

    geometry: Decoder
    norm_before_residual: bool
    """Whether attention is added to the normed hidden state, as drawn, or to the raw one."""
    dtype: DTypeLike = jnp.float32

    def setup(self) -> None:
        self.attention = PairAttention(self.geometry, CAUSAL, self.dtype)
        self.mlp = MLP(self.geometry, self.dtype)

    def __call__(
        self, embedded: Hidden, hidden: Hidden, attend: Attending[Any], memory: Any
    ) -> tuple[Hidden, Any]:
        """The residual stream after the layer, and the layer's new cache."""
        normed = self.attention.hidden_norm(hidden)
        with jax.named_scope("qkv"):
            qkv = self.attention.qkv(self.attention.joined(embedded, normed))
        attended, memory = attend(self.attention, qkv, memory)
        with jax.named_scope("attention_out"):
            out = self.attention.out(attended)
        x = (normed if self.norm_before_residual else hidden) + out
        return x + self.mlp(x), memory

    def write(
        self, embedded: Hidden, hidden: Hidden, attend: Paged, pages: KeysValues
    ) -> KeysValues:
        """Writes keys and values of rows whose outputs are not needed."""
        joined = self.attention.joined(embedded, self.attention.hidden_norm(hidden))
        return attend.write_context(self.attention, joined, pages)


class Eagle3(DrafterModule):
    """The drafter. Embedding and head are the target's unless the checkpoint has its own."""

    config: Eagle3Config

    def setup(self) -> None:
        config, decoder = self.config, self.config.decoder
        hidden, eps = decoder.hidden, decoder.rms_norm_eps
        self._set_up_features()
        self.layers = [
            PairLayer(decoder, config.norm_before_residual, self.dtype),
            *(DecoderLayer(decoder, CAUSAL, self.dtype) for _ in range(decoder.num_layers - 1)),
        ]
        self.norm = RMSNorm(hidden, eps, self.dtype)
        self.set_up_vocabulary()

    def _set_up_features(self) -> None:
        config, eps = self.config, self.config.decoder.rms_norm_eps
        one = Axis("features", config.target_hidden_size)
        together = Axis("features", config.num_features * config.target_hidden_size)
        self.feature_projection = Linear(together, config.decoder.hidden, self.dtype)
        if config.norm_before_fc:
            self.features_norm = RMSNorm(together, eps, self.dtype)
        if config.fc_norm:
            self.each_norm = [RMSNorm(one, eps, self.dtype) for _ in range(config.num_features)]

    @nn.nowrap
    def kernel_choices(self, batch: int, width: int, page_size: int) -> Iterator[OpChoice]:
        """The ops that write the rows of `width` tokens, and those of one row of a chain."""
        decoder, implementation = self.config.decoder, self.implementation
        for rows in dict.fromkeys((width, 1)):
            shape = StackShape(decoder, self.dtype, implementation, batch, rows, page_size)
            if rows == 1 or decoder.num_layers > 1:
                yield from choices_of_attention(shape, (CAUSAL,))
                yield from choices_of_sums(shape, OF_PAIRS)
            yield from choices_of_context(shape)

    def __call__(
        self, embedded: Hidden, hidden: Hidden, block: Block, cache: Cache[KeysValues]
    ) -> tuple[Hidden, Hidden, Cache[KeysValues]]:
        """The rows' final hidden states, the hidden states for the next row of each chain, and the
        cache with the rows in it. `block` says where the rows are."""
        attend = paged(self.config.decoder, block, self.implementation)
        x, written = self.run(embedded, hidden, attend, cache.layers)
        final = self.norm(x)
        return final, final if self.config.norm_output else x, Cache(written)

    def write_rows(
        self, embedded: Hidden, hidden: Hidden, block: Block, cache: Cache[KeysValues]
    ) -> Cache[KeysValues]:
        """Writes rows whose outputs are not needed, so the last layer computes only its keys and
        values."""
        attend = paged(self.config.decoder, block, self.implementation)
        *before, last = cache.layers
        if not before:
            return Cache((self.layers[0].write(embedded, hidden, attend, last),))
        x, written = self.run(embedded, hidden, attend, tuple(before))
        attention = self.layers[-1].attention
        return Cache((*written, attend.write_context(attention, attention.norm(x), last)))

    def run(
        self, embedded: Hidden, hidden: Hidden, attend: Attending[Any], memories: tuple[Any, ...]
    ) -> tuple[Hidden, tuple[Any, ...]]:
        """Runs as many layers as there are memories, for example the pages of each. Returns the
        residual stream after the last, and the memories with the rows."""
        with jax.named_scope("layer_0"):
            x, first = self.layers[0](embedded, hidden, attend, memories[0])
        written = [first]
        for i, of_layer in enumerate(memories[1:], start=1):
            with jax.named_scope(f"layer_{i}"):
                x, of_layer = self.layers[i](x, attend, of_layer)
            written.append(of_layer)
        return x, tuple(written)

    def fuse(self, features: Float[Array, "batch width features"]) -> Hidden:
        """The target's features of each position, projected to one vector."""
        config = self.config
        if config.norm_before_fc:
            features = self.features_norm(features)
        if config.fc_norm:
            parts = jnp.split(features, config.num_features, axis=-1)
            normed = [norm(part) for norm, part in zip(self.each_norm, parts, strict=True)]
            features = jnp.concatenate(normed, axis=-1)
        with jax.named_scope("features"):
            return self.feature_projection(features)

    def logits(self, hidden: Hidden) -> Float[Array, "batch width outputs"]:
        """Logits of hidden states, by the drafter's head or, if tied, by its embedding."""
        if not self.config.head_is_embedding:
            return super().logits(hidden)
        with jax.named_scope("head"):
            return self.embedding.logits(hidden)

    def touch(self) -> None:
        """Uses every parameter once, for initialisation."""
        config, block = self.config, one_token()
        cache = self.new_cache(num_slots=1, num_pages=2, page_size=16)
        embedded = jnp.zeros((1, 1, config.decoder.hidden_size), self.dtype)
        features = jnp.zeros((1, 1, config.num_features * config.target_hidden_size), self.dtype)
        hidden, _, _ = self(embedded, self.fuse(features), block, cache)
        self.touch_vocabulary(block.positions, hidden)
