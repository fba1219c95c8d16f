"""How the splits of one request combine their results.

Each split (a thread block of the cluster) holds, for each row, the softmax state over its part of
the context: the maximum m, the sum of the weights l and the accumulator acc of weighted values.
Split j adds up the j-th part of the accumulators' columns:

        acc of split 0  | c0 | c1 |          split 0 gets   c0 of split 0, c0 of split 1
        acc of split 1  | c0 | c1 |          split 1 gets   c1 of split 0, c1 of split 1

The splits send these parts to each other's shared memory (mailbox.py):

        split 0   tiles ........ | send c0, c1 |          wait, add up c0, store
        split 1   tiles .............. | send c0, c1 |    wait, add up c1, store
                                          m, l and c0 of split 1 -> messages[1] of split 0
                                          m, l and c1 of split 1 -> messages[1] of split 1

If the result is rounded to 8 bits, which takes whole rows, two splits share the rows instead
(`rounding.py`), and c0 and c1 are halves of the rows.

A split waits only for the messages sent to it, and no thread executes a fence: the hardware treats
a cluster-wide fence as one of the whole GPU, which takes microseconds while the memory is busy.
(`async_store_smem` makes every thread execute a fence at every call.) If the messages do not fit
next to the tiles, and in the interpreter, which has no mailbox, the results go through global
memory, with two fences and a cluster barrier. They are always added in the order of the splits.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.jax_internals import pl, plgpu
from pallas_kernels.mailbox import Mailbox
from pallas_kernels.paged_attention.blocks import TILE_ROWS
from pallas_kernels.paged_attention.rounding import (
    HALF_LAYOUT,
    HALF_ROWS,
    TILE_LAYOUT,
    half_of,
    own_half_of,
)
from pallas_kernels.tiles import THREADS, fence_cluster, load

ROW_LAYOUT = TILE_LAYOUT.reduce(1)


@dataclasses.dataclass(frozen=True)
class Exchange:
    """How many splits a request has, and how they exchange their results."""

    splits: int
    head_dim: int
    warpgroups: int
    mailed: bool
    """Whether results go through the mailbox in shared memory, not through global memory."""
    interpreted: bool
    by_rows: bool = False
    """Whether two splits share the rows of a tile, not its columns."""

    @property
    def columns(self) -> int:
        """Columns of the output that each split finishes."""
        return self.head_dim if self.by_rows else self.head_dim // self.splits

    @property
    def rows(self) -> int:
        """Rows of a tile that each split finishes."""
        return HALF_ROWS if self.by_rows else TILE_ROWS

    @property
    def layout(self):
        return HALF_LAYOUT if self.by_rows else TILE_LAYOUT

    @property
    def mailbox(self) -> Mailbox:
        maxima_and_totals = 2 * 2  # each thread holds m and l of two rows
        floats = maxima_and_totals + self.rows * self.columns // THREADS
        return Mailbox(boxes=self.warpgroups, messages=self.splits, floats=floats)

    def scratch(self) -> dict:
        if self.splits == 1:
            return {}
        if self.mailed:
            return self.mailbox.scratch()
        barrier = plgpu.ClusterBarrier(collective_axes=("split",), num_arrivals=self.warpgroups)
        return {"split_bar": barrier}

    def buffers(self, batch: int, kv_heads: int, row_tiles: int) -> tuple:
        """Shapes in global memory for m, l and acc of every split; none if they are not needed."""
        if self.splits == 1 or self.mailed:
            return ()
        leading = (batch, kv_heads, row_tiles, self.splits)
        shapes = ((TILE_ROWS,), (TILE_ROWS,), (TILE_ROWS, self.head_dim))
        return tuple(jax.ShapeDtypeStruct((*leading, *shape), jnp.float32) for shape in shapes)

    def init_barriers(self, scratch) -> None:
        """Called before anything else. `combine` waits for the other splits to have done the same,
        so that this wait overlaps with the loads and products in between."""
        if self.mailed:
            self.mailbox.init_barriers(scratch)

    def combine(self, sums, split, warpgroup, scratch, buffers):
        """What this split finishes; `buffers` are the global memory of one row tile."""
        if self.splits == 1:
            _, l, acc = sums
            return divide(acc, l)
        if self.mailed:
            found = self.through_shared_memory(sums, split, warpgroup, scratch)
        else:
            found = self.through_global_memory(sums, split, scratch, buffers)
        if self.by_rows:
            own = lambda value: own_half_of(value, split, self.interpreted)
            found = [(own(m), own(l), part) for m, l, part in found]
        return add(found)

    def through_shared_memory(self, sums, split, warpgroup, scratch) -> list:
        m, l, acc = sums
        layouts = ROW_LAYOUT, ROW_LAYOUT, self.layout
        self.mailbox.wait_for_barriers()
        for reader in range(self.splits):
            part = self.part_of(acc, reader)
            self.mailbox.write(scratch, warpgroup, split, reader, (m, l, part), layouts)
        shapes = ((TILE_ROWS,), (TILE_ROWS,), (self.rows, self.columns))
        return self.mailbox.read(scratch, warpgroup, 0, shapes, layouts)

    def part_of(self, acc, reader: int):
        """The part of an accumulator that another split finishes."""
        if self.by_rows:
            return half_of(acc, reader, self.interpreted)
        return acc[:, reader * self.columns : (reader + 1) * self.columns]

    def through_global_memory(self, sums, split, scratch, buffers) -> list:
        for value, buffer in zip(sums, buffers):
            buffer.at[split][...] = value
        # The stores of all threads must be visible before any thread arrives at the barrier, and
        # the loads must come after all arrivals.
        fence_cluster(self.interpreted)
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch["split_bar"])
        plgpu.barrier_wait(scratch["split_bar"])
        fence_cluster(self.interpreted)
        maxima, totals, parts = buffers
        return [
            (
                load(maxima.at[i], ROW_LAYOUT),
                load(totals.at[i], ROW_LAYOUT),
                self.own_part(parts.at[i], split),
            )
            for i in range(self.splits)
        ]

    def own_part(self, parts, split):
        if self.by_rows:
            return own_half_of(load(parts, TILE_LAYOUT), split, self.interpreted)
        columns = pl.ds(split * self.columns, self.columns)
        return load(parts.at[:, columns], TILE_LAYOUT)


def add(sums):
    """Adds up the splits' results, first to last, each rescaled to the largest maximum."""
    largest = sums[0][0]
    for m, _, _ in sums[1:]:
        largest = jnp.maximum(largest, m)
    total, out = 0.0, 0.0
    for m, l, part in sums:
        weight = jnp.exp2(m - largest)
        total = total + weight * l
        out = out + part * lax.broadcast_in_dim(weight, part.shape, range(weight.ndim))
    return divide(out, total)


def divide(out, total):
    """`out / total`. A row that sees any position has a total of about 1 or more; one that sees
    none becomes 0."""
    return out / lax.broadcast_in_dim(jnp.maximum(total, 1e-20), out.shape, range(total.ndim))


def tiles_of_split(tiles, split, splits: int):
    """How many of the first `tiles` tiles belong to this split."""
    return lax.div(tiles - split + (splits - 1), splits)
