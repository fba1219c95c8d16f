"""How the splits of one slot add up their sums.

Each split holds, for every row, the maximum m, the sum l of its weights and the weighted values
acc. Split j combines the columns j of acc: every split sends it those columns and its (m, l).

        acc of split 0  | c0 | c1 |          split 0 receives   c0 of split 0, c0 of split 1
        acc of split 1  | c0 | c1 |          split 1 receives   c1 of split 0, c1 of split 1

The sums are always added in the order of the splits.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.blocks import TILE_ROWS
from pallas_kernels.tiles import swizzled

STAT_COLUMNS = 8


@dataclasses.dataclass(frozen=True)
class Exchange:
    splits: int
    columns: int
    interpreted: bool

    def scratch(self):
        if self.splits == 1:
            return {}
        if self.interpreted:
            return dict(split_bar=plgpu.ClusterBarrier(collective_axes=("split",)))
        return dict(
            part=swizzled((self.splits, TILE_ROWS, self.columns), jnp.float32),
            stats=swizzled((self.splits, 2, TILE_ROWS, STAT_COLUMNS), jnp.float32),
            split_bar=plgpu.Barrier(num_arrivals=3 * self.splits),
        )

    def buffers(self, slots, kv_heads, row_tiles):
        """The interpreter knows no stores into a neighbour's shared memory: global memory there."""
        if self.splits == 1 or not self.interpreted:
            return ()
        lead = (slots, kv_heads, row_tiles, self.splits, self.splits)
        f32 = jnp.float32
        return (
            jax.ShapeDtypeStruct((*lead, TILE_ROWS, self.columns), f32),
            jax.ShapeDtypeStruct((*lead, 2, TILE_ROWS, STAT_COLUMNS), f32),
        )

    def combine(self, m, l, acc, split, scratch, buffers, where):
        if self.splits == 1:
            return acc / lax.broadcast_in_dim(l, acc.shape, [0])
        wide = lambda row: lax.broadcast_in_dim(row, (TILE_ROWS, STAT_COLUMNS), [0])
        parts = [acc[:, j * self.columns : (j + 1) * self.columns] for j in range(self.splits)]
        if self.interpreted:
            part, stats = (buffer.at[where] for buffer in buffers)
            for j, columns in enumerate(parts):
                part.at[j, split][...] = columns
                stats.at[j, split, 0][...] = wide(m)
                stats.at[j, split, 1][...] = wide(l)
            plgpu.barrier_arrive(scratch["split_bar"])
            part, stats = part.at[split], stats.at[split]
        else:
            part, stats, bar = scratch["part"], scratch["stats"], scratch["split_bar"]
            for j, columns in enumerate(parts):
                for value, ref in (
                    (columns, part.at[split]),
                    (wide(m), stats.at[split, 0]),
                    (wide(l), stats.at[split, 1]),
                ):
                    plgpu.async_store_smem(
                        value, ref, bar, cluster_idx=j, cluster_dim="split", optimized=False
                    )
        plgpu.barrier_wait(scratch["split_bar"])
        return self.add(part, stats)

    def add(self, part, stats):
        load = lambda ref: plgpu.load(ref, layout=plgpu.Layout.WGMMA, optimized=False)
        # Every column holds the same number: the maximum only drops the columns.
        stat = lambda i, which: load(stats.at[i, which]).max(axis=1)
        maxima = [stat(i, 0) for i in range(self.splits)]
        largest = maxima[0]
        for m in maxima[1:]:
            largest = jnp.maximum(largest, m)
        total, out = 0.0, 0.0
        for i, m in enumerate(maxima):
            weight = jnp.exp2(m - largest)
            columns = load(part.at[i])
            total = total + weight * stat(i, 1)
            out = out + columns * lax.broadcast_in_dim(weight, columns.shape, [0])
        return out / lax.broadcast_in_dim(total, out.shape, [0])


def plan(splits: int, head_dim: int, interpreted: bool) -> Exchange:
    return Exchange(splits, head_dim // splits, interpreted)
