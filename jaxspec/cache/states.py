"""What a recurrent layer remembers: one state per slot, and the block that was written last.

Reading a block does not change the states. It keeps the layer's projection of the block's tokens,
from which commit makes the rows again, to fold the accepted ones into the states. A block that is
read in matrix products also keeps the correction of each row, which commit only has to add.

    step n      read     states ----> outputs of every row;  written := the block
                commit   states + the first `counts` rows ----> states;  written := None

For a chunk of a prompt it is known which tokens are kept, so reading it already computes the states
after it, and commit only stores them.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxspec.cache.block import Block
from pallas_kernels import block_folds, mixer_fold
from pallas_kernels.dispatch import Implementation
from pallas_kernels.gated_delta.block_form import Corrected, Folding
from pallas_kernels.gated_delta.projection import last_inputs
from pallas_kernels.gated_delta.reference import before_block, put

Matrices = Float[Array, "slots value_heads key_dim value_dim"]
Tails = Float[Array, "slots recent channels"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """The tokens of a block, any number of which can be kept, and the parameters that make their
    rows.

    Every array has three axes. The last axis is cut if the layer is sharded."""

    inputs: Float[Array, "batch width outputs"]
    """The layer's projection of the tokens. The convolution's channels come first in it."""
    taps: Float[Array, "... taps channels"]
    decay_bias: Float[Array, "... value_heads"]
    log_rate: Float[Array, "... value_heads"]
    implementation: Implementation = dataclasses.field(metadata={"static": True})

    def added_to(self, states: "States", block: Block) -> "States":
        counts = block.counts
        matrices = mixer_fold(
            self.inputs,
            states.tails,
            self.taps[0],
            self.decay_bias[0, 0],
            self.log_rate[0, 0],
            states.matrices,
            block.slots,
            block.lengths,
            counts,
            implementation=self.implementation,
        )
        after = last_inputs(states.tails_before(block), self.inputs, counts)
        # Without the barrier XLA may write the tails first, and copy them for the read above.
        matrices, after = jax.lax.optimization_barrier((matrices, after))
        return States(matrices, put(states.tails, block.slots, after, counts))


def rows_of(
    inputs: Float[Array, "batch width outputs"],
    taps: Float[Array, "taps channels"],
    decay_bias: Float[Array, " value_heads"],
    log_rate: Float[Array, " value_heads"],
    implementation: Implementation,
) -> Rows:
    of_head = decay_bias[None, None], log_rate[None, None]
    return Rows(inputs, taps[None], *of_head, implementation)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CorrectedRows:
    """The tokens of a block that was read in matrix products, any number of which can be kept.

    Every array has three axes, as in `Rows`."""

    inputs: Float[Array, "batch width outputs"]
    """The layer's projection of the tokens; only the convolution's channels are read."""
    corrected: Corrected
    implementation: Implementation = dataclasses.field(metadata={"static": True})

    def folding_into(self, states: "States") -> Folding:
        return Folding(self.inputs, *self.corrected, states.tails, states.matrices)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ends:
    """The states after a block whose counts were known when it was read."""

    matrices: Float[Array, "batch value_heads key_dim value_dim"]
    tails: Float[Array, "batch recent channels"]

    def added_to(self, states: "States", block: Block) -> "States":
        kept = lambda before, after: put(before, block.slots, after, block.counts)
        return States(kept(states.matrices, self.matrices), kept(states.tails, self.tails))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class States:
    """The states of one layer: one for every slot, and after them the saved ones, if any."""

    matrices: Matrices
    """In float32, which sums over a long text need."""
    tails: Tails
    """The last inputs of the convolution, for as many tokens as it looks back."""
    written: Rows | CorrectedRows | Ends | None = None
    """The block that was written last; None between steps. If a step is several programs, it is
    passed from one to the next apart from the state, which is donated."""

    def commit(self, block: Block) -> "States":
        return self.commit_together([self], block)[0]

    @staticmethod
    def commit_together(layers: Sequence["States"], block: Block) -> list["States"]:
        with jax.named_scope("delta_fold"):
            written = [one.written for one in layers]
            assert None not in written, "nothing was written since the last commit"
            corrected = [one for one in written if isinstance(one, CorrectedRows)]
            if len(corrected) == len(layers):
                return folded_together(layers, corrected, block)
            return [one.with_added(block) for one in layers]

    def with_added(self, block: Block) -> "States":
        assert isinstance(self.written, Rows | Ends), "layers that were read in different ways"
        return self.written.added_to(self, block)

    def with_row_copied(self, source: Int[Array, ""], target: Int[Array, ""]) -> "States":
        assert self.written is None, "states are copied between steps"
        copied = lambda rows: rows.at[target].set(rows[source])
        return States(copied(self.matrices), copied(self.tails))

    def tails_before(self, block: Block) -> Float[Array, "batch recent channels"]:
        """The tails of the block's requests; zeros for a request that begins."""
        return before_block(self.tails, block.slots, block.lengths)


def folded_together(
    layers: Sequence[States], written: Sequence[CorrectedRows], block: Block
) -> list[States]:
    """The states of these layers with the blocks that they read in matrix products."""
    folded = block_folds(
        tuple(one.folding_into(states) for one, states in zip(written, layers)),
        block.slots,
        block.lengths,
        block.counts,
        implementation=written[0].implementation,
    )
    return [States(*one) for one in folded]


def empty_states(
    num_slots: int,
    matrix: tuple[int, int, int],
    tail: tuple[int, int],
    dtype: DTypeLike,
) -> States:
    """States before any token: for each slot a matrix of shape [value_heads, key_dim, value_dim]
    and a tail of shape [recent, channels]."""
    return States(
        jnp.zeros((num_slots, *matrix), jnp.float32), jnp.zeros((num_slots, *tail), dtype)
    )
