"""Recurrence over the states of a cache, for decoding."""

import dataclasses

import jax
from jaxtyping import Array, Float

from jaxspec.cache.block import Block
from jaxspec.cache.states import Ends, Rows, States, last_inputs
from jaxspec.layers.gated_delta import GatedDelta
from pallas_kernels import delta_prefill, delta_read
from pallas_kernels.dispatch import Implementation


@dataclasses.dataclass(frozen=True)
class InSlots:
    """Runs a block from the states of its requests' slots, which stay as they are."""

    block: Block
    implementation: Implementation

    @property
    def batch(self) -> int:
        """Requests of the block."""
        return self.block.slots.size

    def __call__(
        self,
        mixer: GatedDelta,
        mixed: Float[Array, "batch width channels"],
        log_decay: Float[Array, "batch width value_heads"],
        beta: Float[Array, "batch width value_heads"],
        states: States,
    ) -> tuple[Float[Array, "batch width value_heads value_dim"], States]:
        block, before = self.block, states.tails_before(self.block)
        with jax.named_scope("convolution"):
            rows = mixer.rows(before, mixed)
        told = rows.key, rows.value, log_decay, beta
        of_slots = states.matrices, block.slots, block.lengths
        if block.final:
            outputs, after = delta_prefill(
                rows.query, *told, *of_slots, block.counts, implementation=self.implementation
            )
            written = Ends(after, last_inputs(before, mixed, block.counts))
        else:
            outputs = delta_read(rows.query, *told, *of_slots, implementation=self.implementation)
            # Without the barrier XLA keeps all of the projection, in parts, until the commit; and
            # commits before it reads if it knows the counts, for which it copies the states.
            written = Rows(*told, mixed, self.implementation)
            outputs, written = jax.lax.optimization_barrier((outputs, written))
        return outputs, dataclasses.replace(states, written=written)
