"""Recurrence over the states of a cache, for decoding."""

import dataclasses

import jax
from jaxtyping import Array, Float

from jaxspec.cache.block import Block
from jaxspec.cache.states import CorrectedRows, Ends, States, rows_of
from jaxspec.layers.gated_delta import GatedDelta, in_block_form
from pallas_kernels import block_read, delta_prefill, mixer_read
from pallas_kernels.dispatch import Implementation
from pallas_kernels.gated_delta.projection import last_inputs


@dataclasses.dataclass(frozen=True)
class InSlots:
    """Runs a block from the states of its requests' slots, and does not change these states."""

    block: Block
    implementation: Implementation
    row_by_row: bool
    """Whether blocks are read row by row, so that bits do not depend on where a block begins."""

    @property
    def batch(self) -> int:
        """Requests of the block."""
        return self.block.slots.size

    def __call__(
        self,
        mixer: GatedDelta,
        inputs: Float[Array, "batch width outputs"],
        states: States,
    ) -> tuple[Float[Array, "batch width attended"], States]:
        block = self.block
        of_slots = states.matrices, block.slots, block.lengths
        if block.final:
            before = states.tails_before(block)
            with jax.named_scope("convolution"):
                rows = mixer.rows(before, inputs)
            outputs, after = delta_prefill(
                *rows, *of_slots, block.counts, implementation=self.implementation
            )
            ends = last_inputs(before, inputs, block.counts)
            written = Ends(after, ends)
            return mixer.gated(outputs, inputs), dataclasses.replace(states, written=written)
        given = inputs, states.tails, *mixer.of_rows
        if not self.row_by_row and in_block_form(self.implementation, *given, *of_slots):
            norm = mixer.output_norm
            options = {"eps": norm.eps, "implementation": self.implementation}
            read = block_read(*given, *of_slots, norm.scale, **options)
            # Without the barrier XLA keeps the projection in parts, as below.
            (outputs, corrected), inputs = jax.lax.optimization_barrier((read, inputs))
            written = CorrectedRows(inputs, corrected, self.implementation)
            attended = outputs.reshape(*inputs.shape[:2], -1)
            return attended, dataclasses.replace(states, written=written)
        outputs = mixer_read(*given, *of_slots, implementation=self.implementation)
        # Without the barrier, XLA does not add up a projection in parts before the commit. And if
        # it knows the counts, it commits before it reads, and copies the states for that.
        outputs, inputs = jax.lax.optimization_barrier((outputs, inputs))
        written = rows_of(inputs, *mixer.of_rows, self.implementation)
        return mixer.gated(outputs, inputs), dataclasses.replace(states, written=written)
