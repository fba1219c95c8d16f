"""The numbers of one call, and what calls hand on to each other."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Int

BARRIERS = 3
"""Where the thread blocks of a call wait for each other: between its products."""


@dataclasses.dataclass(frozen=True)
class ChainShape:
    """What decides whether the kernel can do a call, and how it is shared out."""

    tokens: int
    """Of the whole batch."""
    attended: int
    """Numbers that attention gives per token."""
    hidden: int
    """Numbers of the residual stream per token."""
    inner: int
    """Columns of gate, and of up."""
    qkv: int
    """Columns of the next layer's matrix; 0 without one."""


class Arrivals(NamedTuple):
    """How often thread blocks have arrived at each barrier, in all calls up to now.

    Calls that follow each other hand it on, up to 16 million of them. So no counter has to be set
    to zero between two calls, which would be a kernel of its own, and no two calls run side by
    side, where each would wait for multiprocessors that the other has.
    """

    counters: Int[Array, " barriers"]
    """Arrivals at each barrier."""
    calls: ArrayLike
    """How many calls those were."""


def first_arrivals() -> Arrivals:
    return Arrivals(jnp.zeros((BARRIERS,), jnp.int32), 0)
