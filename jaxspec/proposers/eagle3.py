"""EAGLE-3 as a device proposer: drafts tokens one by one, each from a row with the token before it.

    committed     t0 t1 .. t(n-1)      newest token t(n), drafts d1 d2 ..
    rows          0: (f0, t1)  1: (f1, t2)  ..  n-2: (f(n-2), t(n-1))      written by `absorb`
    pending       f(n-1), which waits for t(n)
    chain         n-1: (f(n-1), t(n)) -> d1     n: (h, d1) -> d2     n+1: (h', d2) -> d3 ..

A row needs the token after its position, so the feature of the last committed position waits for
the next step. The rows of a chain are scratch: `absorb` overwrites them with rows that are made of
the target's features.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.cache.block import Block, block_after
from jaxspec.cache.cache import Cache
from jaxspec.errors import UsageError
from jaxspec.models.eagle3 import Eagle3, Hidden
from jaxspec.models.eagle3_config import MOST_DRAFTS
from jaxspec.models.parameters import num_bytes
from jaxspec.models.target import Target
from jaxspec.proposers.device import Committed, DraftInputs, Drafts, Params
from jaxspec.proposers.drafter import DrafterProposer
from jaxspec.sampling import draw_drafts, probabilities


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowState:
    """The proposer's state."""

    cache: Cache
    """Keys and values of rows, row i in the cell of position i."""
    pending: Float[Array, "slots hidden"]
    """The projected feature of every slot's last committed position."""
    awaited: Int[Array, " slots"]
    """The position whose token this feature waits for; 0 if the slot has no feature yet."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows to be computed, and their places in the cache."""

    block: Block
    tokens: Int[Array, "batch width"]
    hidden: Hidden
    """The feature of each row, or instead the hidden state of the row before it."""


@dataclasses.dataclass(frozen=True)
class Eagle3Proposer(DrafterProposer):
    """The EAGLE-3 proposer."""

    drafter: Eagle3

    looks_ahead = 1
    max_positions = None
    """No limit: positions only rotate keys and queries, so text of any length can be drafted. The
    max_position_embeddings of a drafter's config is often too small."""

    def new_state(self, num_slots: int, num_pages: int, page_size: int, positions: int) -> RowState:
        hidden = self.drafter.config.decoder.hidden_size
        return RowState(
            self.drafter.new_cache(num_slots, num_pages, page_size),
            jnp.zeros((num_slots, hidden), self.drafter.dtype),
            jnp.zeros(num_slots, jnp.int32),
        )

    def recall(
        self,
        state: RowState,
        slot: Int[Array, ""],
        tokens: Int[Array, " positions"],
        count: Int[Array, ""],
    ) -> RowState:
        """Drops the feature that waits in the slot, which is an earlier request's. The rows of the
        tokens are in pages already."""
        return dataclasses.replace(state, awaited=state.awaited.at[slot].set(0))

    def with_num_drafts(self, num_drafts: int) -> "Eagle3Proposer":
        if not 1 <= num_drafts <= MOST_DRAFTS:
            raise UsageError(
                f"num_drafts is {num_drafts}; expected 1 to {MOST_DRAFTS} with an EAGLE-3 drafter, "
                "which drafts one token after the other"
            )
        config = dataclasses.replace(self.drafter.config, num_drafts=num_drafts)
        return Eagle3Proposer(self.drafter.clone(config=config))

    def propose(
        self,
        target: Target,
        params: Params,
        state: RowState,
        inputs: DraftInputs,
        *,
        width: int,
        drawn: bool,
    ) -> tuple[RowState, Drafts]:
        """Runs one row per draft, the first with the newest token. All these rows are scratch."""
        tokens, hidden = inputs.tokens[:, None], state.pending[inputs.slots][:, None]
        cache, drafts, over_all, own = state.cache, [], [], []
        shards = self.shards
        for step in range(width - 1):
            rows = Rows(_row_of_chain(inputs, step), tokens, hidden)
            logits, hidden, cache = self.row(target, params, rows, cache)
            if drawn:
                logits = self.over_target_vocabulary(params, logits)
                positions = inputs.lengths[:, None] + step + 1
                tokens = draw_drafts(logits, inputs.sampling, positions, shards)
                over_all.append(logits)
            else:
                tokens = self.likeliest(params, logits)
            if inputs.scored:
                sure = probabilities(logits, tokens, shards) if drawn else self.certainty(logits)
                tokens = shards.after(tokens, sure)
                own.append(sure)
            drafts.append(tokens)
        joined = lambda parts: jnp.concatenate(parts, axis=1) if parts else None
        drafted = Drafts(
            jnp.concatenate(drafts, axis=1), inputs.num_drafts, joined(over_all), joined(own)
        )
        return dataclasses.replace(state, cache=cache), drafted

    def row(
        self, target: Target, params: Params, rows: Rows, cache: Cache
    ) -> tuple[Float[Array, "batch width outputs"], Hidden, Cache]:
        """Logits over the drafter's vocabulary (or this device's part of it), the hidden states
        for the next row of each chain, and the cache with these rows."""
        embedded = self.embedded(target, params, rows.tokens)
        final, passed_on, cache = self.apply(params, embedded, rows.hidden, rows.block, cache)
        return self.logits(target, params, final), passed_on, cache

    def absorb(self, params: Params, state: RowState, committed: Committed) -> RowState:
        """Writes the rows of these tokens, made of the target's features, and keeps the newest
        feature for the next step."""
        block = committed.block
        fused = self.apply(params, committed.features, method="fuse")
        rows = _true_rows(state, committed, fused)
        embedded = self.embedded(committed.target, params, rows.tokens)
        cache = self.apply(
            params, embedded, rows.hidden, rows.block, state.cache, method="write_rows"
        )
        last = jnp.maximum(block.counts - 1, 0)[:, None, None]
        newest = jnp.take_along_axis(fused, last, axis=1)[:, 0]
        any_kept = block.counts > 0
        pending = jnp.where(any_kept[:, None], newest, state.pending[block.slots])
        awaited = jnp.where(any_kept, block.lengths + block.counts, state.awaited[block.slots])
        return RowState(
            cache,
            state.pending.at[block.slots].set(pending),
            state.awaited.at[block.slots].set(awaited),
        )

    def bytes_read(self, params: Params, target_head: int) -> int:
        """Every draft reads the layers and the head; the projection of features is read once."""
        own = {name: num_bytes(part) for name, part in params["drafter"].items()}
        of_table, config = own.pop("embedding", 0), self.drafter.config
        head = of_table if config.head_is_embedding else own.pop("head", target_head)
        once = own.pop("target_ids", 0) + sum(
            own.pop(name) for name in [*own] if name.startswith(("feature", "each_norm"))
        )
        return once + config.num_drafts * (sum(own.values()) + head)


def _row_of_chain(inputs: DraftInputs, step: int) -> Block:
    """One row of each request, `step` rows after the last committed position."""
    before = jnp.maximum(inputs.lengths - 1, 0) + step
    table, size = inputs.page_table, inputs.page_size
    return block_after(inputs.slots, before, inputs.active, table, 1, size)


def _true_rows(state: RowState, committed: Committed, fused: Hidden) -> Rows:
    """The rows that can be made with these tokens.

    positions       n     n+1   n+2        n committed before, 3 committed now
    a feature waits (f(n-1), t(n))   (f(n), t(n+1))     (f(n+1), t(n+2))    3 rows from n-1 on
    none waits                       (f(n), t(n+1))     (f(n+1), t(n+2))    2 rows from n on

    No feature waits when a request begins, at its first token or after pages from the prefix cache.
    """
    block, size = committed.block, state.cache.layers[0].keys.shape[1]
    waits = (block.lengths > 0) & (state.awaited[block.slots] == block.lengths)
    pending = state.pending[block.slots][:, None]
    shifted = jnp.concatenate([pending, fused[:, :-1]], axis=1)
    hidden = jnp.where(waits[:, None, None], shifted, fused)
    tokens, width = committed.tokens, committed.tokens.shape[1]
    tokens = jnp.where(waits[:, None], tokens, jnp.roll(tokens, -1, axis=1))
    before = jnp.where(waits, block.lengths - 1, block.lengths)
    counts = jnp.where(waits, block.counts, jnp.maximum(block.counts - 1, 0))
    rows = block_after(block.slots, before, counts, block.page_table, width, size)
    return Rows(rows, tokens, hidden)
