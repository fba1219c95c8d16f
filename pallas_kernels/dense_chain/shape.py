"""The shape of one call, and the barrier counters that calls pass to each other."""

import dataclasses
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Int

from pallas_kernels.releases import MOVES_REGISTERS

UNIT = 64
"""Columns of a matrix in one tile, the most that one warpgroup multiplies at a time."""
PAIRS = 66
"""Clusters of two thread blocks, all on the GPU at once: one block per multiprocessor of an H100.
Each has one tile of out and of down at a time."""
BARRIERS = 4
"""The most barriers of all thread blocks in one call. Calls whose rows are not rounded to 8 bits
use only the first three: one after each product but the last."""
MOST_TOKENS = 64
"""Tokens of the largest call. With more of them, single products are faster than the chain."""
MOST_ROUNDED_TOKENS = 128 if MOVES_REGISTERS else MOST_TOKENS
"""The same if rows are rounded to 8 bits, which take half the memory. The sums of more than
MOST_TOKENS need registers of the warpgroups that load."""
MORE_TOKENS, MORE_ROUNDED_TOKENS = (
    f"more than {most} tokens per step" for most in (MOST_TOKENS, MOST_ROUNDED_TOKENS)
)
"""The reasons why such calls do not run in the chain. They are no fault of the model or the
device."""


Scaled = Literal["blocks", "outputs"]
"""What a scale of an 8-bit matrix belongs to."""


@dataclasses.dataclass(frozen=True)
class ChainShape:
    """The sizes that decide whether the kernel can run a call and how its work is split."""

    tokens: int
    """Tokens of the whole batch: requests times width."""
    attended: int
    """Size of the attention output per token: heads times head_dim."""
    hidden: int
    """Size of the residual stream per token."""
    inner: int
    """Columns of the gate matrix; up has as many."""
    qkv: int
    """Columns of the next layer's qkv matrix; 0 if there is none."""
    scaled: Scaled | None = None
    """What a scale belongs to if the matrices are in 8 bits; None if they have the rows' dtype."""
    quantised_inputs: bool = False
    """Whether the rows of each product are rounded to 8 bits too, in pieces of 128 inputs."""
    attended_in_8_bits: bool = False
    """Whether the rows of the first product come in 8 bits already, rounded by attention."""
    norm_dtype: str | None = None
    """The dtype of the norms' scales; None if it is that of the rows."""
    devices: int = 1
    """GPUs that add up their parts of the products with out and down."""

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest call that the kernel can do."""
        return MOST_ROUNDED_TOKENS if self.quantised_inputs else MOST_TOKENS

    @property
    def best_up_to(self) -> int:
        """Up to how many tokens the chain is faster than single products."""
        return self.most_tokens if self.keeps_busy else MOST_TOKENS

    @property
    def keeps_busy(self) -> bool:
        """Whether three of four pairs have a tile of out and of down all the time. If fewer have
        one, single products of many tokens are faster. Of 4B only 40 of 66 have one."""
        tiles = self.hidden // UNIT
        rounds = -(-tiles // PAIRS)
        return 4 * tiles >= 3 * rounds * PAIRS

    @property
    def more_tokens(self) -> str:
        return MORE_ROUNDED_TOKENS if self.best_up_to > MOST_TOKENS else MORE_TOKENS


NEIGHBOURS = 2 * PAIRS * 4
"""Barriers of two warpgroups that have neighbouring tiles: for each of two products, for each two
of at most 132 tiles, and for each of the four warpgroups that finish a tile."""


class Arrivals(NamedTuple):
    """How often warpgroups have arrived at each barrier, in all calls so far.

    Each call takes the value that the previous call returned, for up to 16 million calls. So no
    counter has to be reset between calls, which would take another kernel. This dependency also
    keeps two calls from running at the same time, in which case each would wait forever for
    multiprocessors that the other one holds.
    """

    counters: Int[Array, " barriers"]
    """Arrivals at each barrier: first at those of all thread blocks, then at those of
    neighbours."""
    calls: ArrayLike
    """Number of calls so far."""


def first_arrivals() -> Arrivals:
    return Arrivals(jnp.zeros((BARRIERS + NEIGHBOURS,), jnp.int32), 0)
