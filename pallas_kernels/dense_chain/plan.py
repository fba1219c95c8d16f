"""How the products of a chain are shared out among the thread blocks, and the memory that takes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dense_chain.shape import ChainShape
from pallas_kernels.mailbox import Mailbox
from pallas_kernels.tiles import SHARED_BYTES, THREADS, require, swizzled

UNIT = 64
"""Columns that one warpgroup multiplies at a time."""
CHUNKS = 4
"""Squares of UNIT x UNIT weights that arrive together."""
DEPTH = CHUNKS * UNIT
"""Inputs of the rows that arrive together."""
CONSUMERS = 2
"""Warpgroups that multiply: of gate and up each its columns, of a tile each its rows."""
PAIR = 2
"""Thread blocks that may share the inputs of a tile."""
GROUP = 8
"""Rows that a warpgroup finishes at a time."""
PAIRS = 66
"""Clusters, all of them on the GPU at once: one block per multiprocessor of an H100."""
MOST_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The free choices of the kernel."""

    weight_stages: int
    """Groups of chunks that a thread block keeps, of this product and the next."""
    row_stages: int
    """Pieces of rows that it keeps."""
    in_flight: int = 2
    """Groups that are asked for and not there yet. More would only lengthen the queue in which the
    blocks' messages to each other wait as well."""

    def __post_init__(self):
        assert self.in_flight <= self.weight_stages, "no more in flight than there is room for"


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about one call."""

    shape: ChainShape
    eps: float
    dtype: Any
    pairs: int
    """Clusters of two thread blocks, all of them on the GPU at once."""
    sizes: Sizes
    only: int | None
    """The one product that runs (the interpreter runs thread blocks one by one, so that none may
    wait for another)."""

    @property
    def alone(self) -> bool:
        return self.only is not None

    @property
    def blocks(self) -> int:
        return self.pairs * PAIR

    @property
    def groups(self) -> int:
        return self.shape.tokens // GROUP

    @property
    def groups_each(self) -> int:
        """Of a warpgroup. If they are an odd number, the middle one is multiplied twice."""
        return -(-self.groups // CONSUMERS)

    @property
    def twice(self) -> int:
        return self.groups_each * CONSUMERS - self.groups

    @property
    def products(self) -> int:
        return 4 if self.shape.qkv else 3

    def outputs(self) -> dict[str, jax.ShapeDtypeStruct]:
        shapes = self.shapes()
        if self.only is not None:
            return {name: shapes[name] for name in STAGES[self.only]}
        stages = STAGES[: self.products]
        return {name: shapes[name] for stage in stages for name in stage if name not in SUMS}

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        rows, of_hidden = self.shape.tokens, self.shape.hidden
        narrow = lambda *shape: jax.ShapeDtypeStruct(shape, self.dtype)
        wide = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
        hidden, squares = narrow(rows, of_hidden), wide(of_hidden // UNIT, MOST_TOKENS)
        parts = wide(PAIR, rows, of_hidden)
        return {
            "attention_parts": parts,
            "attention_total": hidden,
            "attention_scaled": hidden,
            "attention_squares": squares,
            "gated": narrow(rows, self.shape.inner),
            "mlp_parts": parts,
            "total": hidden,
            "scaled": hidden,
            "squares": squares,
            "next_qkv": narrow(rows, self.shape.qkv),
        }

    def scratch(self) -> dict[str, Any]:
        sizes = self.sizes
        barrier = lambda arrivals, number: plgpu.Barrier(num_arrivals=arrivals, num_barriers=number)
        return {
            "weights": swizzled((sizes.weight_stages * CHUNKS, UNIT, UNIT), self.dtype),
            "tiles": swizzled((sizes.row_stages * CHUNKS, self.shape.tokens, UNIT), self.dtype),
            "weights_here": barrier(CHUNKS, sizes.weight_stages),
            "weights_used": barrier(CONSUMERS, sizes.weight_stages),
            "rows_here": barrier(CHUNKS, sizes.row_stages),
            "rows_used": barrier(CONSUMERS, sizes.row_stages),
            "turned": swizzled((CONSUMERS, GROUP, UNIT), jnp.float32),
            "inverse": plgpu.SMEM((MOST_TOKENS,), jnp.float32),
            "inverse_here": barrier(1, 1),
        } | (self.pair_barrier() if self.alone else self.mailbox.scratch())

    @property
    def mailbox(self) -> Mailbox:
        return mailbox_for(self.shape.tokens)

    def pair_barrier(self) -> dict[str, Any]:
        return {"met": plgpu.ClusterBarrier(collective_axes=("half",), num_arrivals=CONSUMERS)}


SUMS = ("attention_parts", "mlp_parts")
"""What goes through global memory in the interpreter only."""
STAGES = (
    ("attention_parts", "attention_total", "attention_scaled", "attention_squares"),
    ("gated",),
    ("mlp_parts", "total", "scaled", "squares"),
    ("next_qkv",),
)
"""What each product writes."""


def mailbox_for(rows: int) -> Mailbox:
    """A box per group that a block finishes: the blocks of a pair take turns."""
    return Mailbox(-(-rows // (GROUP * PAIR)), 1, UNIT * GROUP // THREADS)


def check_device() -> None:
    """Thread blocks wait for each other, so all must run at once. A machine without a GPU can only
    compile for one, which is allowed."""
    device = jax.devices()[0]
    found = getattr(device, "core_count", 0) if device.platform == "gpu" else PAIR * PAIRS
    require(found >= PAIR * PAIRS, f"{PAIR * PAIRS} multiprocessors, as H100 SXM and H200 have")


def check(shape: ChainShape, dtype, pairs: int = PAIRS) -> None:
    require(jnp.dtype(dtype) == jnp.bfloat16, "bfloat16 throughout")
    require(
        shape.tokens % GROUP == 0 and 0 < shape.tokens <= MOST_TOKENS,
        f"8, 16, .. {MOST_TOKENS} tokens",
    )
    require(min(shape.attended, shape.hidden, shape.inner) > 0, "something to multiply")
    require(shape.hidden % 512 == 0, "hidden sizes in multiples of 512")
    halves = shape.attended % (PAIR * DEPTH) == 0 == shape.inner % (PAIR * DEPTH)
    require(halves, f"heads and inner sizes in multiples of {PAIR * DEPTH}")
    require(shape.hidden // UNIT <= pairs, "a tile of the hidden size for every cluster")
    most = pairs * PAIR * CONSUMERS
    require(shape.inner // UNIT <= most, "inner columns for every warpgroup")
    require(shape.qkv % UNIT == 0, f"qkv in multiples of {UNIT}")
    require(shape.qkv // UNIT <= pairs * PAIR, "a tile of qkv for every block")


LEAST_ROW_STAGES, MOST_ROW_STAGES = 3, 6
"""Rows come from the second-level cache, but wait in line behind weights. With 64 rows there is
room for three pieces, or for two and a group of weights more, which is as fast."""
SMALL_BYTES = 2 * 1024
"""What is kept beside weights, rows and sums; every array begins at a kilobyte of its own."""


def choose_sizes(rows: int) -> Sizes:
    mailbox, turned = mailbox_for(rows), CONSUMERS * GROUP * UNIT * 4
    free = SHARED_BYTES - SMALL_BYTES - mailbox.boxes * mailbox.bytes - turned
    group, piece = DEPTH * UNIT * 2, rows * DEPTH * 2
    weight_stages = (free - LEAST_ROW_STAGES * piece) // group
    row_stages = (free - weight_stages * group) // piece
    return Sizes(weight_stages, min(row_stages, MOST_ROW_STAGES))
