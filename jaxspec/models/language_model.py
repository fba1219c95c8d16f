"""What all targets have besides their layers: an embedding, a final norm, a head."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxspec.cache.block import one_token
from jaxspec.layers.axes import Axis
from jaxspec.layers.linear import Embedding, Linear, RMSNorm
from jaxspec.layers.shards import Shards
from pallas_kernels.dispatch import Implementation


class LanguageModel(nn.Module):
    """The base class of targets, without layers. `jaxspec.models.target` says what a target has."""

    config: Any
    capture: tuple[int, ...] = ()
    """Layers after which the residual stream is captured as features, in this order."""
    dtype: DTypeLike = jnp.float32
    implementation: Implementation = "auto"

    def setup(self) -> None:
        config, decoder = self.config, self.config.decoder
        whole = Axis("vocab", config.vocab_size)
        vocab = whole.cut(decoder.shards)
        # Every device has all of an embedding that is not also the head. That takes memory, but
        # devices need not add up anything when tokens are embedded.
        embedded = vocab if config.tie_word_embeddings else whole
        self.embedding = Embedding(embedded, decoder.hidden, self.dtype)
        norms = decoder.norm_dtype(self.dtype)
        self.norm = RMSNorm(decoder.hidden, decoder.rms_norm_eps, norms)
        if not config.tie_word_embeddings:
            self.head = Linear(decoder.hidden, vocab, self.dtype)

    @nn.nowrap
    def with_kernels[Itself: nn.Module](self: Itself, implementation: Implementation) -> Itself:
        return self.clone(implementation=implementation)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def shards(self) -> Shards:
        """Over how many devices the model is sharded."""
        return self.config.decoder.shards

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.config.eos_token_ids

    @property
    def max_positions(self) -> int:
        return self.config.decoder.max_position_embeddings

    def captured(
        self,
        x: Float[Array, "batch width hidden"],
        after: list[Float[Array, "batch width hidden"]],
    ) -> Float[Array, "batch width features"]:
        """The features. `after` is the residual stream after each layer, `x` before the first."""
        features = [after[i] for i in self.capture] or [x[..., :0]]
        return jnp.concatenate(features, axis=-1)

    def embed(self, tokens: Int[Array, "batch width"]) -> Float[Array, "batch width hidden"]:
        return self.embedding(tokens)

    def logits(
        self, hidden: Float[Array, "batch width hidden"]
    ) -> Float[Array, "batch width outputs"]:
        """Logits over the vocabulary, or over this device's part of it."""
        with jax.named_scope("head"):
            if self.config.tie_word_embeddings:
                return self.embedding.logits(hidden)
            return self.head(hidden)

    def touch(self) -> None:
        """Uses every parameter once, for initialisation."""
        block, cache = one_token(), self.new_cache(num_slots=1, num_pages=2, page_size=16)
        hidden, _, _ = self(block.positions, block, cache)
        self.logits(hidden)
