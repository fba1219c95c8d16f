"""How the splits of one slot add up their sums.

Every split holds, for each row, the maximum m, the sum l of its weights and the weighted values
acc. All of them write these to global memory (it stays in the L2 cache), meet at a barrier of
their cluster, and split j adds up the j-th piece of the columns:

        acc of split 0  | c0 | c1 |          split 0 reads   c0 of split 0, c0 of split 1
        acc of split 1  | c0 | c1 |          split 1 reads   c1 of split 0, c1 of split 1

The sums are always added in the order of the splits.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.blocks import TILE_ROWS

ROWS = plgpu.Layout.WGMMA.reduce(1)


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One slot's splits, and the columns of the result that each of them finishes."""

    splits: int
    head_dim: int
    warpgroups: int

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

    def combine(self, m, l, acc, split, barrier, buffers):
        """The normalized columns of this split; `buffers` are those of one row tile."""
        if self.splits == 1:
            return acc / lax.broadcast_in_dim(l, acc.shape, [0])
        for value, buffer in zip((m, l, acc), buffers):
            buffer.at[split][...] = value
        plgpu.commit_smem()  # Every thread's stores come before the arrival of any.
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
        return self.add(split, *buffers)

    def add(self, split, maxima, totals, parts):
        columns = pl.ds(split * self.columns, self.columns)
        load = lambda ref, layout: plgpu.load(ref, layout=layout, optimized=False)
        maxima = [load(maxima.at[i], ROWS) for i in range(self.splits)]
        largest = maxima[0]
        for m in maxima[1:]:
            largest = jnp.maximum(largest, m)
        total, out = 0.0, 0.0
        for i, m in enumerate(maxima):
            weight = jnp.exp2(m - largest)
            part = load(parts.at[i, :, columns], plgpu.Layout.WGMMA)
            total = total + weight * load(totals.at[i], ROWS)
            out = out + part * lax.broadcast_in_dim(weight, part.shape, [0])
        return out / lax.broadcast_in_dim(total, out.shape, [0])
