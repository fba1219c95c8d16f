"""How the tokens of each request are drawn, as arrays on the device."""

import dataclasses

import jax
from jaxtyping import Array, Float, Int, UInt32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotSampling:
    """Sampling parameters: an entry per slot or request of a batch; scalars for a single one."""

    temperature: Float[Array, "*slots"]
    """Temperature; 0 takes the most likely token."""
    top_k: Int[Array, "*slots"]
    """Number of most likely tokens that are kept; 0 keeps all."""
    top_p: Float[Array, "*slots"]
    """Probability mass of the most likely tokens that are kept, after top_k; 1 keeps all."""
    min_p: Float[Array, "*slots"]
    """Tokens less likely than this share of the most likely one are dropped; 0 keeps all."""
    seed: UInt32[Array, "*slots"]
    """Seed. With the token's position it makes the key of a draw, which depends on nothing else."""

    def of(self, slots: Int[Array, " batch"]) -> "SlotSampling":
        return jax.tree.map(lambda entries: entries[slots], self)

    @property
    def of_rows(self) -> "SlotSampling":
        """The parameters of a batch, with an axis for the tokens of each request."""
        return jax.tree.map(lambda entries: entries[:, None], self)
