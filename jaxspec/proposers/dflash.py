"""DFlash as a device proposer: the drafter fills a block of mask tokens in one pass.

A drafter with a transition then chooses the tokens place by place (`walk`). A drafter with a
confidence head can propose fewer drafts than the block has places.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.cache.block import Block
from jaxspec.cache.cache import Cache
from jaxspec.models.dflash import DFlash
from jaxspec.models.parameters import num_bytes
from jaxspec.models.target import Target
from jaxspec.proposers.device import Committed, DraftInputs, Drafts, Params
from jaxspec.proposers.drafter import DrafterProposer
from jaxspec.proposers.walk import Chosen, Drawing, walk, walk_bytes
from jaxspec.sampling import draw_drafts, probabilities


@dataclasses.dataclass(frozen=True)
class DFlashProposer(DrafterProposer):
    """The DFlash proposer. Its state is the drafter's cache, whose context comes from the features
    of committed tokens."""

    drafter: DFlash
    confidence_threshold: float = 0.0
    """A proposal ends before the first place whose confidence is lower; 0 for whole proposals."""

    in_pages = True

    @property
    def max_positions(self) -> int:
        config = self.drafter.config
        return config.decoder.max_position_embeddings - config.rows

    def new_state(self, num_slots: int, num_pages: int, page_size: int, positions: int) -> Cache:
        return self.drafter.new_cache(num_slots, num_pages, page_size)

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
        """The next state and the drafts. The cache then has the block's keys and values as scratch:
        `absorb` overwrites the cells of tokens that are kept."""
        config, places = self.drafter.config, width - 1
        block = inputs.block(config.rows)
        hidden, state = self._hidden(target, params, inputs.tokens, block, state)
        hidden = hidden[:, :places]  # before the head, which takes longer for every place
        logits = self.drafter.capped(self.logits(target, params, hidden))
        drawing = partial(self._drawing, inputs, block, places) if drawn else None
        if config.transition is None:
            chosen = self._independently(params, logits, drawing, inputs.scored)
        else:
            of_places = hidden, logits
            chosen = self._walking(params, inputs.tokens, *of_places, drawing, inputs.scored)
        scores, wanted = chosen.probabilities, inputs.num_drafts
        if config.confidence is not None and (inputs.scored or self.confidence_threshold > 0):
            scores = self._confidence(params, inputs.tokens, hidden, chosen.tokens)
            wanted = jnp.minimum(wanted, self._sure(scores))
        return state, Drafts(chosen.tokens, wanted, chosen.drawn_from, scores)

    def absorb(self, params: Params, state: Cache, committed: Committed) -> Cache:
        features, block = committed.features, committed.block
        return self.apply(params, features, block, state, method="write_context")

    def logits(
        self, target: Target, params: Params, hidden: Float[Array, "batch width hidden"]
    ) -> Float[Array, "batch width outputs"]:
        """Logits as any drafter's proposer computes them, but by the drafter's copy of the head in
        8 bits if the step reads it."""
        places = hidden.shape[0] * hidden.shape[1]
        if self.drafter.copied_head_product(places) is None:
            return super().logits(target, params, hidden)
        return self.apply(params, hidden, method="copied_logits")

    def bytes_read(self, params: Params, target_head: int) -> int:
        """The least number of bytes, which is that of a step with few requests: one with many may
        read the head itself instead of its copy."""
        config, drafter = self.drafter.config, params["drafter"]
        head = 0 if config.owns_head else target_head
        unread = {"embedding", "transition"}
        if config.copies_head:
            head = 0
            unread.add("head")
        if self.confidence_threshold == 0:
            unread.add("confidence_head")
        own = {name: part for name, part in drafter.items() if name not in unread}
        walked = 0 if config.transition is None else walk_bytes(config, drafter["transition"])
        return head + walked + num_bytes(own)

    def _hidden(
        self,
        target: Target,
        params: Params,
        current: Int[Array, " batch"],
        block: Block,
        cache: Cache,
    ) -> tuple[Float[Array, "batch drafts hidden"], Cache]:
        """Hidden states of the drafted places."""
        config = self.drafter.config
        masks = jnp.full(block.positions.shape, config.mask_token_id, jnp.int32)
        tokens = masks.at[:, 0].set(current)
        hidden, cache = self.apply(params, self.embedded(target, params, tokens), block, cache)
        return hidden[:, config.rows - config.num_drafts :], cache

    def _independently(
        self,
        params: Params,
        logits: Float[Array, "batch drafts outputs"],
        drawing: Callable[[], Drawing] | None,
        scored: bool,
    ) -> Chosen:
        """A token for each drafted place, independently of the other places."""
        if drawing is None:
            own = self.certainty(logits) if scored else None
            return Chosen(self.likeliest(params, logits), None, own)
        logits, how = self.over_target_vocabulary(params, logits), drawing()
        tokens = draw_drafts(logits, how.sampling, how.positions, self.shards)
        own = probabilities(logits, tokens, self.shards) if scored else None
        return Chosen(tokens, logits, own)

    def _walking(
        self,
        params: Params,
        current: Int[Array, " batch"],
        hidden: Float[Array, "batch drafts hidden"],
        logits: Float[Array, "batch drafts outputs"],
        drawing: Callable[[], Drawing] | None,
        scored: bool,
    ) -> Chosen:
        """A token for each drafted place, given the token of the place before it."""
        how = None if drawing is None else drawing()
        own = self.drafter, params["drafter"]
        chosen = walk(*own, current, hidden, logits, how, scored=scored)
        if chosen.drawn_from is None:
            return chosen
        drawn_from = self.shards.after(chosen.drawn_from, chosen.tokens)
        over_all = self.over_target_vocabulary(params, drawn_from)
        return dataclasses.replace(chosen, drawn_from=over_all)

    def _confidence(
        self,
        params: Params,
        current: Int[Array, " batch"],
        hidden: Float[Array, "batch drafts hidden"],
        tokens: Int[Array, "batch drafts"],
    ) -> Float[Array, "batch drafts"]:
        """The confidence head's probability that each draft is accepted if those before it are."""
        previous = jnp.concatenate([current[:, None], tokens[:, :-1]], axis=1)
        return self.apply(params, hidden, previous, method="confidence")

    def _sure(self, confidence: Float[Array, "batch drafts"]) -> Int[Array, " batch"]:
        """Number of drafts before the first one whose confidence is below the threshold."""
        sure = confidence >= self.confidence_threshold
        return jnp.cumprod(sure, axis=1, dtype=jnp.int32).sum(axis=1, dtype=jnp.int32)

    def _drawing(self, inputs: DraftInputs, block: Block, places: int) -> Drawing:
        after_rows = self.drafter.config.anchor_first
        positions = block.positions + 1 if after_rows else block.positions[:, 1:]
        return Drawing(inputs.sampling, positions[:, :places])
