"""How the splits of one slot add up their sums.

Every split holds, for each row, the maximum m, the sum l of its weights and the weighted values
acc. Split j adds up the j-th piece of the columns of all of them:

        acc of split 0  | c0 | c1 |          split 0 gets   c0 of split 0, c0 of split 1
        acc of split 1  | c0 | c1 |          split 1 gets   c1 of split 0, c1 of split 1

They send them to each other's shared memory (mailbox.py):

        split 0   tiles ........ | send c0, c1 |          wait, add up c0, store
        split 1   tiles .............. | send c0, c1 |    wait, add up c1, store
                                          m, l and c0 of split 1 -> notes[1] of split 0
                                          m, l and c1 of split 1 -> notes[1] of split 1

A split waits for nothing but its own notes, and nobody fences: to the hardware a fence of the
cluster is one of the whole GPU, which takes microseconds while memory is busy. (`async_store_smem`
has every thread fence at every call.) Where the notes do not fit beside the tiles, and in the
interpreter, which has no mailbox, the sums go through global memory, two fences and a barrier of
the cluster. They are always added in the order of the splits.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mailbox import Mailbox
from pallas_kernels.paged_attention.blocks import TILE_ROWS
from pallas_kernels.tiles import THREADS, fence_cluster, load

TILE = plgpu.Layout.WGMMA
ROWS = TILE.reduce(1)


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One slot's splits, and the columns of the result that each of them finishes."""

    splits: int
    head_dim: int
    warpgroups: int
    mailed: bool
    """Whether sums go through shared memory."""
    interpreted: bool

    @property
    def columns(self) -> int:
        return self.head_dim // self.splits

    @property
    def mailbox(self) -> Mailbox:
        maxima_and_totals = 2 * 2  # of two rows, which four threads hold alike
        floats = maxima_and_totals + TILE_ROWS * self.columns // THREADS
        return Mailbox(boxes=self.warpgroups, notes=self.splits, floats=floats)

    def scratch(self) -> dict:
        if self.splits == 1:
            return {}
        if self.mailed:
            return self.mailbox.scratch()
        barrier = plgpu.ClusterBarrier(collective_axes=("split",), num_arrivals=self.warpgroups)
        return {"split_bar": barrier}

    def buffers(self, batch: int, kv_heads: int, row_tiles: int) -> tuple:
        """Global memory for m, l and acc of every split."""
        if self.splits == 1 or self.mailed:
            return ()
        lead = (batch, kv_heads, row_tiles, self.splits)
        shapes = ((TILE_ROWS,), (TILE_ROWS,), (TILE_ROWS, self.head_dim))
        return tuple(jax.ShapeDtypeStruct((*lead, *shape), jnp.float32) for shape in shapes)

    def open(self, scratch) -> None:
        """Before anything else; the other splits hear of it while they load and multiply."""
        if self.mailed:
            self.mailbox.open(scratch)

    def combine(self, sums, split, warpgroup, scratch, buffers):
        """The normalized columns of this split; `buffers` are those of one row tile."""
        if self.splits == 1:
            _, l, acc = sums
            return divide(acc, l)
        if self.mailed:
            return add(self.through_shared_memory(sums, split, warpgroup, scratch))
        return add(self.through_global_memory(sums, split, scratch, buffers))

    def through_shared_memory(self, sums, split, warpgroup, scratch) -> list:
        m, l, acc = sums
        layouts, columns = (ROWS, ROWS, TILE), self.columns
        self.mailbox.opened()
        for reader in range(self.splits):
            piece = acc[:, reader * columns : (reader + 1) * columns]
            self.mailbox.write(scratch, warpgroup, split, reader, (m, l, piece), layouts)
        shapes = ((TILE_ROWS,), (TILE_ROWS,), (TILE_ROWS, columns))
        return self.mailbox.read(scratch, warpgroup, 0, shapes, layouts)

    def through_global_memory(self, sums, split, scratch, buffers) -> list:
        for value, buffer in zip(sums, buffers):
            buffer.at[split][...] = value
        # Every thread's stores come before the arrival of any, and the loads after all of them.
        fence_cluster(self.interpreted)
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch["split_bar"])
        plgpu.barrier_wait(scratch["split_bar"])
        fence_cluster(self.interpreted)
        maxima, totals, parts = buffers
        columns = pl.ds(split * self.columns, self.columns)
        return [
            (
                load(maxima.at[i], ROWS),
                load(totals.at[i], ROWS),
                load(parts.at[i, :, columns], TILE),
            )
            for i in range(self.splits)
        ]


def add(sums):
    """Online softmax over the splits, first to last."""
    largest = sums[0][0]
    for m, _, _ in sums[1:]:
        largest = jnp.maximum(largest, m)
    total, out = 0.0, 0.0
    for m, l, part in sums:
        weight = jnp.exp2(m - largest)
        total = total + weight * l
        out = out + part * lax.broadcast_in_dim(weight, part.shape, [0])
    return divide(out, total)


def divide(out, total):
    """A row that saw something has a total of about 1 or more; one that saw nothing becomes 0."""
    return out / lax.broadcast_in_dim(jnp.maximum(total, 1e-20), out.shape, [0])
