"""The numbers of one call, and what calls hand on to each other."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Int

PLACES = 3
"""Where the thread blocks of a call meet: between its products."""


@dataclasses.dataclass(frozen=True)
class ChainShape:
    """What decides whether the kernel can do a call, and how it is shared out."""

    rows: int
    """Tokens: slots times width."""
    attended: int
    """Numbers that attention gives per row."""
    hidden: int
    """Numbers of the residual stream per row."""
    inner: int
    """Columns of gate, and of up."""
    qkv: int
    """Columns of the next layer's matrix; 0 without one."""


class Meetings(NamedTuple):
    """How often thread blocks have met. Calls that follow each other hand it on, up to 16 million
    of them: so nobody has to set counters to zero between them, which would be a kernel of its own,
    and no two run side by side, where each would wait for multiprocessors that the other has."""

    counters: Int[Array, " places"]
    """Arrivals at each place, in all calls."""
    calls: ArrayLike
    """How many those were."""


def first_meetings() -> Meetings:
    return Meetings(jnp.zeros((PLACES,), jnp.int32), 0)
