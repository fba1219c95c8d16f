"""DFlash as a device proposer: the drafter fills a block of masks in one pass over it."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.cache.block import Block
from jaxspec.cache.cache import Cache
from jaxspec.layers.kernels import OpChoice
from jaxspec.models.dflash import DFlash
from jaxspec.models.target import Target
from jaxspec.proposers.device import Committed, DraftInputs, Drafts, Params
from jaxspec.sampling import draw_drafts
from pallas_kernels.dispatch import Implementation


@dataclasses.dataclass(frozen=True)
class DFlashProposer:
    """The DFlash proposer. Its state is the drafter's cache, whose context comes from the features
    of committed tokens."""

    drafter: DFlash

    @property
    def num_drafts(self) -> int:
        return self.drafter.config.num_drafts

    @property
    def max_positions(self) -> int:
        config = self.drafter.config
        return config.decoder.max_position_embeddings - config.block_size

    def new_state(self, num_slots: int, num_pages: int, page_size: int, positions: int) -> Cache:
        return self.drafter.new_cache(num_slots, num_pages, page_size)

    def with_kernels(self, implementation: Implementation) -> "DFlashProposer":
        return DFlashProposer(self.drafter.with_kernels(implementation))

    def kernel_choices(self, batch: int, width: int, page_size: int) -> Iterator[OpChoice]:
        return self.drafter.kernel_choices(batch, width, page_size)

    def propose(
        self,
        target: Target,
        params: Params,
        state: Cache,
        inputs: DraftInputs,
        *,
        width: int,
        drawn: bool,
    ) -> tuple[Cache, Drafts]:
        """Also writes the block into the cache, as scratch: `absorb` overwrites the cells of
        tokens that are kept."""
        block = inputs.block(self.drafter.config.block_size)
        logits, state = self.logits(target, params, inputs.tokens, block, state)
        if drawn:
            logits = self._over_target_vocabulary(params, logits)
            tokens = draw_drafts(logits, inputs.sampling, block.positions[:, 1:])
        else:
            likeliest = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            tokens = self._apply(params, likeliest, method="target_tokens")
        places = width - 1
        return state, Drafts(
            tokens[:, :places], inputs.num_drafts, logits[:, :places] if drawn else None
        )

    def absorb(self, params: Params, state: Cache, committed: Committed) -> Cache:
        features, block = committed.features, committed.block
        return self._apply(params, features, block, state, method="write_context")

    def bytes_read(self, params: Params, target_head: int) -> int:
        own = {name: part for name, part in params["drafter"].items() if name != "embedding"}
        head = 0 if self.drafter.config.owns_head else target_head
        return head + sum(leaf.nbytes for leaf in jax.tree.leaves(own))

    def logits(
        self,
        target: Target,
        params: Params,
        current: Int[Array, " batch"],
        block: Block,
        cache: Cache,
    ) -> tuple[Float[Array, "batch drafts draft_vocab"], Cache]:
        """Logits of the drafted places, over the drafter's own vocabulary if it has one."""
        config = self.drafter.config
        masks = jnp.full(block.positions.shape, config.mask_token_id, jnp.int32)
        tokens = masks.at[:, 0].set(current)
        of_target = lambda *inputs, method: _apply(target, params["target"], *inputs, method=method)
        of_drafter = lambda *inputs, **how: self._apply(params, *inputs, **how)
        embedded = (of_drafter if config.owns_embedding else of_target)(tokens, method="embed")
        hidden, cache = of_drafter(embedded.astype(self.drafter.dtype), block, cache)
        head = of_drafter if config.owns_head else of_target
        return head(hidden[:, 1:], method="logits"), cache

    def _over_target_vocabulary(
        self, params: Params, logits: Float[Array, "batch drafts draft_vocab"]
    ) -> Float[Array, "batch drafts vocab"]:
        """Logits over the target's vocabulary: minus infinity for tokens that the drafter's reduced
        vocabulary leaves out."""
        config = self.drafter.config
        if config.draft_vocab_size is None:
            return logits
        own = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, :]
        ids = self._apply(params, own, method="target_tokens")[0]
        nowhere = jnp.full((*logits.shape[:-1], config.vocab_size), -jnp.inf, logits.dtype)
        return nowhere.at[..., ids].set(logits)

    def _apply(self, params: Params, *inputs: Any, method: str = "__call__") -> Any:
        return _apply(self.drafter, params["drafter"], *inputs, method=method)


def _apply(model: Any, params: Params, *inputs: Any, method: str) -> Any:
    with jax.named_scope(type(model).__name__.lower()):
        return model.apply({"params": params}, *inputs, method=method)
