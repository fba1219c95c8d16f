"""The DFlash drafter: one pass over a block of masks, conditioned on the target's features.

    features of committed tokens --W_fc, norm--> context --k, v of every layer--> drafter's pages
    [current, mask, mask, ...]   --embedding-->  block   --layers attending pages + block--> hidden

The context is projected once and shared by all layers. It is not normed again in each layer, has no
queries and goes through no MLP. Row k of the block predicts the token at its own position, or, if
the config says `anchor_first`, the token after it.
"""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from jaxspec.cache.block import Block, one_token
from jaxspec.cache.cache import Cache
from jaxspec.cache.keys_values import KeysValues
from jaxspec.layers.axes import Axis
from jaxspec.layers.decoder import DecoderLayer
from jaxspec.layers.fp8 import Fp8Linear
from jaxspec.layers.kernels import (
    OpChoice,
    StackShape,
    choices_of_context,
    choices_of_layers,
)
from jaxspec.layers.linear import BiasedLinear, Linear, RMSNorm
from jaxspec.layers.paged import paged
from jaxspec.layers.shards import Shards
from jaxspec.layers.stack import run_layers
from jaxspec.models.config import ConfidenceHead, DFlashConfig, MarkovHead, Selector
from jaxspec.models.copied_head import copied_head_product
from jaxspec.models.drafter import DrafterModule
from jaxspec.models.markov import Markov
from jaxspec.models.selector import CandidateSelector


class DFlash(DrafterModule):
    """The drafter. Embedding and head are the target's unless the checkpoint has its own."""

    config: DFlashConfig

    def setup(self) -> None:
        config = self.config
        decoder = config.decoder.with_kernels(self.implementation)
        hidden, eps = decoder.hidden, decoder.rms_norm_eps
        features = Axis("features", len(config.target_layer_ids) * hidden.size)
        self.feature_projection = Linear(features, hidden, self.dtype)
        self.feature_norm = RMSNorm(hidden, eps, self.dtype)
        self.layers = [
            DecoderLayer(decoder, mask, self.dtype, config.convolutions)
            for mask in config.block_masks
        ]
        self.norm = RMSNorm(hidden, eps, self.dtype)
        vocab, drafted = Axis("vocab", config.vocab_size), self.set_up_vocabulary()
        if config.copies_head:
            assert decoder.fp8 is not None, "only a drafter in FP8 copies a head"
            self.copied_head = Fp8Linear(hidden, drafted, decoder.fp8)
        if isinstance(config.transition, MarkovHead):
            self.transition = Markov(config.transition, hidden, vocab, drafted, self.dtype)
        if isinstance(config.transition, Selector):
            self.transition = CandidateSelector(config.transition, hidden, vocab, self.dtype)
        if config.confidence is not None:
            inputs = (hidden, *self._row_read(config.confidence))
            self.confidence_head = BiasedLinear(inputs, Axis("confidence", 1), self.dtype)

    @nn.nowrap
    def with_quantised_inputs(self) -> "DFlash":
        """The same model, whose 8-bit matrices multiply activations that are rounded to 8 bits."""
        decoder = self.config.decoder.with_quantised_inputs()
        return self.clone(config=dataclasses.replace(self.config, decoder=decoder))

    @nn.nowrap
    def with_shards(self, shards: Shards) -> DrafterModule:
        """The module of one device's shard, which has no copy of a head."""
        shard = super().with_shards(shards)
        copies = shard.config.copies_head and shards.count == 1
        return shard.clone(config=dataclasses.replace(shard.config, copies_head=copies))

    @nn.nowrap
    def kernel_choices(self, batch: int, width: int, page_size: int) -> Iterator[OpChoice]:
        """The ops that write the context of `width` tokens, and those that draft a block."""
        config, implementation = self.config, self.implementation
        shape = StackShape(config.decoder, self.dtype, implementation, batch, width, page_size)
        yield from choices_of_context(shape)
        drafting = dataclasses.replace(shape, width=config.rows)
        convolved = config.convolutions is not None
        yield from choices_of_layers(drafting, config.block_masks, convolved)
        product = self.copied_head_product(batch * min(width - 1, config.num_drafts))
        if product is not None:
            yield product

    @nn.nowrap
    def copied_head_product(self, places: int) -> OpChoice | None:
        """What multiplies the copied head in a step that chooses drafts at this many places, of all
        its requests together; None if the step does not read it."""
        return copied_head_product(self.config, self.dtype, self.implementation, places)

    def copied_logits(
        self, hidden: Float[Array, "batch width hidden"]
    ) -> Float[Array, "batch width outputs"]:
        """Logits of hidden states, by the copied head."""
        with jax.named_scope("head"):
            return self.copied_head(hidden)

    def __call__(
        self, embedded: Float[Array, "batch width hidden"], block: Block, cache: Cache[KeysValues]
    ) -> tuple[Float[Array, "batch width hidden"], Cache[KeysValues]]:
        """Final hidden states of the block, and the cache with the block's keys and values in it.

        The block's cells are scratch: the context of the same positions overwrites them once the
        target has committed those tokens.
        """
        attend = paged(self.config.decoder, block, self.implementation)
        x = self.scaled(embedded)
        hidden, _, cache = run_layers(self.layers, self.norm, x, attend, cache)
        return hidden, cache

    def write_context(
        self, features: Float[Array, "batch width features"], block: Block, cache: Cache[KeysValues]
    ) -> Cache[KeysValues]:
        """Writes the context of committed tokens, computed from the target's features of them."""
        write = paged(self.config.decoder, block, self.implementation).write_context
        context = self.feature_norm(self.feature_projection(features))
        layers = zip(self.layers, cache.layers, strict=True)
        return cache.with_layers(write(layer.attention, context, pages) for layer, pages in layers)

    @nn.nowrap
    def scaled(
        self, embedded: Float[Array, "batch width hidden"]
    ) -> Float[Array, "batch width hidden"]:
        """Embedded tokens as the first layer reads them."""
        scale = self.config.embedding_scale
        return embedded if scale == 1 else embedded * jnp.asarray(scale, embedded.dtype)

    @nn.nowrap
    def capped(
        self, logits: Float[Array, "batch width outputs"]
    ) -> Float[Array, "batch width outputs"]:
        """The head's logits, scaled and soft-capped as the config says; these choose the drafts."""
        scale, cap = self.config.logit_scale, self.config.logit_cap
        scaled = logits if scale == 1 else logits * jnp.asarray(scale, logits.dtype)
        return scaled if cap is None else cap * jnp.tanh(scaled / cap)

    def confidence(
        self, hidden: Float[Array, "batch drafts hidden"], previous: Int[Array, "batch drafts"]
    ) -> Float[Array, "batch drafts"]:
        """The probability that each draft is accepted if all drafts before it are. `previous` is
        the token before each place. Only for a drafter with a confidence head."""
        return jax.nn.sigmoid(self.confidence_logits(hidden, previous))

    def confidence_logits(
        self, hidden: Float[Array, "batch drafts hidden"], previous: Int[Array, "batch drafts"]
    ) -> Float[Array, "batch drafts"]:
        """The confidence before the sigmoid."""
        head = self.config.confidence
        assert head is not None, "this drafter has no confidence head"
        rows = (self.transition.preceding(previous),) if head.reads_token else ()
        logits = self.confidence_head(hidden, *rows)[..., 0]
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))

    def _row_read(self, head: ConfidenceHead) -> tuple[Axis, ...]:
        """The axis of the row that the confidence head reads besides the hidden state, if any."""
        transition = self.config.transition
        return (Axis("rank", transition.rank),) if head.reads_token and transition else ()

    def touch(self) -> None:
        """Uses every parameter once, for initialisation."""
        block, cache = one_token(), self.new_cache(num_slots=1, num_pages=2, page_size=16)
        embedded = jnp.zeros((1, 1, self.config.decoder.hidden_size), self.dtype)
        features = jnp.tile(embedded, len(self.config.target_layer_ids))
        hidden, cache = self(embedded, block, self.write_context(features, block, cache))
        self.touch_vocabulary(block.positions, hidden)
        if self.config.copies_head:
            self.copied_logits(hidden)
        if self.config.transition is not None:
            self.transition.touch()
        if self.config.confidence is not None:
            self.confidence(hidden, block.positions)
