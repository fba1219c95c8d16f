"""What the calls of one stack of layers hand on to each other, hidden from the stack."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.dense_chain.api import dense_chain, dense_chain_runs
from pallas_kernels.dense_chain.shape import Arrivals, ChainShape, first_arrivals
from pallas_kernels.dispatch import Implementation
from pallas_kernels.paged_attention.api import filled_attention


class ChainWeights(NamedTuple):
    """What one call multiplies and norms with."""

    out: Float[Array, "attended hidden"]
    norm: Float[Array, " hidden"]
    gate_up: Float[Array, "hidden twice_inner"]
    down: Float[Array, "inner hidden"]
    next_norm: Float[Array, " hidden"]
    qkv: Float[Array, "hidden fused"] | None
    """The next layer's; none after the last layer."""


TOKENS_TOGETHER = 8
"""The kernel takes tokens in eights."""


@dataclasses.dataclass(frozen=True)
class Chain:
    """`dense_chain`, call after call, for one stack and one batch.

    Whole requests that belong to no one fill the batch up to what the kernel takes. They go along
    through the stack: no token looks at another here, and attention leaves theirs alone, so what
    is in them means nothing.
    """

    batch: int
    filled_batch: int
    runs: bool
    """Whether the kernel can do the calls; if not, nothing is filled up, and `next` is not to be
    called."""
    implementation: Implementation
    arrivals: Arrivals

    def filled(self, x: Float[Array, "batch width hidden"]) -> Float[Array, "filled width hidden"]:
        """The residual stream with the batch filled up."""
        added = self.filled_batch - self.batch
        return jnp.pad(x, ((0, added), (0, 0), (0, 0))) if added else x

    def own(self, x: Float[Array, "filled width size"]) -> Float[Array, "batch width size"]:
        """Of the requests that were there before the batch was filled up."""
        return x[: self.batch]

    def paged_attention(
        self, query: Float[Array, "batch kv_heads width group head_dim"], *pages: Array, **how: Any
    ) -> Float[Array, "filled width heads head_dim"]:
        """The op of this name, with its result in a filled batch."""
        return filled_attention(query, *pages, filled_batch=self.filled_batch, **how)

    def next(
        self,
        attended: Float[Array, "filled width attended"],
        x: Float[Array, "filled width hidden"],
        weights: ChainWeights,
        *,
        eps: float,
    ) -> tuple[
        Float[Array, "filled width hidden"], Float[Array, "filled width fused"] | None, "Chain"
    ]:
        """`dense_chain` on the batch, and the chain for the next call."""
        total, qkv, arrivals = dense_chain(
            attended.reshape(-1, attended.shape[-1]),
            x.reshape(-1, x.shape[-1]),
            *weights,
            arrivals=self.arrivals,
            eps=eps,
            implementation=self.implementation,
        )
        by_request = lambda y: y.reshape(*x.shape[:2], y.shape[-1])
        following = dataclasses.replace(self, arrivals=arrivals)
        return by_request(total), None if qkv is None else by_request(qkv), following


def begin_chain(
    shape: ChainShape, width: int, dtype: DTypeLike, implementation: Implementation
) -> Chain:
    """For a stack whose layers have this shape, in a step of `width` tokens per request."""
    batch = shape.tokens // width
    filled_batch = batch_in_eights(batch, width)
    filled = dataclasses.replace(shape, tokens=filled_batch * width)
    runs = dense_chain_runs(filled, dtype, implementation)
    return Chain(batch, filled_batch if runs else batch, runs, implementation, first_arrivals())


def batch_in_eights(batch: int, width: int) -> int:
    """The least number of requests, no fewer, whose tokens are a multiple of 8."""
    step = TOKENS_TOGETHER // math.gcd(width, TOKENS_TOGETHER)
    return -(-batch // step) * step
