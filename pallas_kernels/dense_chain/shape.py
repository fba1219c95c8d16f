"""The shape of one call, and the barrier counters that calls pass to each other."""

import dataclasses
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Int

BARRIERS = 4
"""The most barriers of all thread blocks in one call. Calls whose rows are not rounded to 8 bits
use only the first three: one after each product but the last."""
MOST_TOKENS = 64
"""Tokens of the largest call. With more of them, single products are faster than the chain."""
MORE_TOKENS = f"more than {MOST_TOKENS} tokens per step"
"""The reason why such calls do not run in the chain. It is no fault of the model or the device."""


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
    norm_dtype: str | None = None
    """The dtype of the norms' scales; None if it is that of the rows."""
    devices: int = 1
    """GPUs that add up their parts of the products with out and down."""


NEIGHBOURS = 2 * 66 * 4
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
