"""`dense_chain` for a stack of layers: passes `arrivals` from call to call and pads the batch."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.dense_chain.api import chain_choice, dense_chain, exchanging_chain
from pallas_kernels.dense_chain.shape import Arrivals, ChainShape, first_arrivals
from pallas_kernels.dense_chain.weights import ChainWeights
from pallas_kernels.dispatch import Implementation
from pallas_kernels.exchange import Inboxes
from pallas_kernels.fp8_product import RoundedRows, Rounding
from pallas_kernels.paged_attention.api import filled_attention, rounds_itself

TOKEN_MULTIPLE = 8
"""The kernel takes multiples of 8 tokens."""


@dataclasses.dataclass(frozen=True)
class Chain:
    """The `dense_chain` calls of one stack of layers in one step.

    The batch is padded with whole requests to a size that the kernel takes. The padding stays for
    the whole stack. Its values are undefined and do no harm: `dense_chain` computes each token by
    itself, and attention ignores padding.
    """

    batch: int
    filled_batch: int
    runs: bool
    """Whether the kernel can run the calls. If not, the batch is not padded and `next` must not be
    called."""
    implementation: Implementation
    arrivals: Arrivals
    inboxes: Inboxes | None = None
    """How several GPUs add up their parts of products; None on a single GPU."""
    axis_name: str = ""
    """The axis of these GPUs in `jax.shard_map`."""
    quantise_inputs: bool = False
    """Whether the inputs of products are rounded to 8 bits, on a single GPU."""

    def filled(self, x: Float[Array, "batch width hidden"]) -> Float[Array, "filled width hidden"]:
        """The residual stream of the padded batch."""
        added = self.filled_batch - self.batch
        return jnp.pad(x, ((0, added), (0, 0), (0, 0))) if added else x

    def own(self, x: Float[Array, "filled width size"]) -> Float[Array, "batch width size"]:
        """Removes the padding: the part of `x` that belongs to the batch's own requests."""
        return x[: self.batch]

    def paged_attention(
        self,
        query: Float[Array, "batch kv_heads width group head_dim"],
        *pages: Array,
        rounding: Rounding | None = None,
        **options: Any,
    ) -> Float[Array, "filled width heads head_dim"] | RoundedRows:
        """The op `paged_attention`, with a result for the padded batch. If the next product wants
        it rounded to 8 bits, `rounding` says how. What the op cannot round while it writes it is
        left to the next kernel."""
        if not rounds_itself(query, rounding, self.implementation):
            rounding = None
        filled = {"filled_batch": self.filled_batch, "rounding": rounding}
        return filled_attention(query, *pages, **filled, **options)

    def next(
        self,
        attended: Float[Array, "filled width attended"] | RoundedRows,
        x: Float[Array, "filled width hidden"],
        weights: ChainWeights,
        *,
        eps: float,
    ) -> tuple[
        Float[Array, "filled width hidden"], Float[Array, "filled width fused"] | None, "Chain"
    ]:
        """Calls `dense_chain`; returns its results and the chain for the next call."""
        rows, stream = one_axis(attended), x.reshape(-1, x.shape[-1])
        options: dict[str, Any] = {"eps": eps, "implementation": self.implementation}
        inboxes = self.inboxes
        if inboxes is None:
            options["quantise_inputs"] = self.quantise_inputs
            total, qkv, arrivals = dense_chain(rows, stream, *weights, self.arrivals, **options)
        else:
            assert not isinstance(rows, RoundedRows), "several GPUs round no rows"
            options["axis_name"] = self.axis_name
            total, qkv, arrivals, inboxes = exchanging_chain(
                rows, stream, weights, self.arrivals, inboxes, **options
            )
        by_request = lambda y: y.reshape(*x.shape[:2], y.shape[-1])
        next_chain = dataclasses.replace(self, arrivals=arrivals, inboxes=inboxes)
        return by_request(total), None if qkv is None else by_request(qkv), next_chain


def one_axis(
    rows: Float[Array, "filled width attended"] | RoundedRows,
) -> Float[Array, "tokens attended"] | RoundedRows:
    """The same rows with one axis of tokens."""
    if isinstance(rows, RoundedRows):
        return dataclasses.replace(rows, numbers=one_axis(rows.numbers))
    return rows.reshape(-1, rows.shape[-1])


def begin_chain(
    shape: ChainShape,
    width: int,
    dtype: DTypeLike,
    implementation: Implementation,
    inboxes: Inboxes | None = None,
    axis_name: str = "",
) -> Chain:
    """The chain of a stack whose layers have this shape, for `width` tokens per request."""
    batch = shape.tokens // width
    filled = filled_shape(shape, width)
    runs = chain_choice(filled, dtype, implementation).implementation == "mosaic"
    filled_batch = filled.tokens // width if runs else batch
    known = batch, filled_batch, runs, implementation, first_arrivals(), inboxes, axis_name
    return Chain(*known, quantise_inputs=shape.quantised_inputs)


def filled_shape(shape: ChainShape, width: int) -> ChainShape:
    """The shape with as many requests of `width` tokens as the kernel needs."""
    filled_batch = batch_in_eights(shape.tokens // width, width)
    return dataclasses.replace(shape, tokens=filled_batch * width)


def batch_in_eights(batch: int, width: int) -> int:
    """The smallest number of requests, at least `batch`, whose tokens are a multiple of 8."""
    step = TOKEN_MULTIPLE // math.gcd(width, TOKEN_MULTIPLE)
    return -(-batch // step) * step
