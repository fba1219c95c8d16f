"""How the splits of one slot add up their sums.

Every split holds, for each row, the maximum m, the sum l of its weights and the weighted values
acc. Split j adds up the j-th piece of the columns of all of them:

        acc of split 0  | c0 | c1 |          split 0 gets   c0 of split 0, c0 of split 1
        acc of split 1  | c0 | c1 |          split 1 gets   c1 of split 0, c1 of split 1

They hand them over through global memory, which the second-level cache holds, and a barrier of the
cluster. (Through the neighbours' shared memory it took 6 to 12 us: 4096 stores of eight bytes, each
counted on a barrier.) The sums are always added in the order of the splits.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.blocks import TILE_ROWS
from pallas_kernels.tiles import fence_cluster, load

TILE = plgpu.Layout.WGMMA
ROWS = TILE.reduce(1)


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One slot's splits, and the columns of the result that each of them finishes."""

    splits: int
    head_dim: int
    warpgroups: int
    interpreted: bool

    @property
    def columns(self) -> int:
        return self.head_dim // self.splits

    def scratch(self) -> dict:
        if self.splits == 1:
            return {}
        barrier = plgpu.ClusterBarrier(collective_axes=("split",), num_arrivals=self.warpgroups)
        return {"split_bar": barrier}

    def buffers(self, slots: int, kv_heads: int, row_tiles: int) -> tuple:
        """Global memory for m, l and acc of every split."""
        if self.splits == 1:
            return ()
        lead = (slots, kv_heads, row_tiles, self.splits)
        shapes = ((TILE_ROWS,), (TILE_ROWS,), (TILE_ROWS, self.head_dim))
        return tuple(jax.ShapeDtypeStruct((*lead, *shape), jnp.float32) for shape in shapes)

    def combine(self, sums, split, scratch, buffers):
        """The normalized columns of this split; `buffers` are those of one row tile."""
        m, l, acc = sums
        if self.splits == 1:
            return divide(acc, l)
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
        return add(
            [
                (
                    load(maxima.at[i], ROWS),
                    load(totals.at[i], ROWS),
                    load(parts.at[i, :, columns], TILE),
                )
                for i in range(self.splits)
            ]
        )


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
