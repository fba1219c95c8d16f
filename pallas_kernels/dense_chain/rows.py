"""What happens to rows from one product to the next: sums, residual, norm."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dense_chain.loading import Shares
from pallas_kernels.dense_chain.plan import (
    FINISHERS,
    GROUP,
    PAIR,
    UNIT,
    Plan,
)
from pallas_kernels.tiles import load, rows_in_lanes, store

ACC = plgpu.Layout.WGMMA
TURNED = plgpu.Layout.WGMMA_TRANSPOSED
PER_ROW = ACC.reduce(0)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Four warpgroups of a pair have summed a tile, each over its share of the inputs. They add up
    their sums, and each finishes eight rows of the tile, if there are so many."""

    plan: Plan
    refs: dict[str, Any]
    scratch: dict[str, Any]
    shares: Shares
    warpgroup: Any

    @property
    def mine(self):
        """Which of the four this is."""
        return self.warpgroup * PAIR + self.shares.half

    def residual(self, p: int, x: str, norm: str):
        """What `add` will need that is there already: asked for now, it costs no time then."""
        columns, layout = pl.ds(self.shares.columns(p), UNIT), rows_in_lanes(UNIT)
        scale = load(self.refs[norm].at[columns], layout.reduce(0))
        group = jnp.minimum(self.mine, self.plan.groups - 1)
        return load(self.refs[x].at[pl.ds(group * GROUP, GROUP), columns], layout), scale

    def add(self, p: int, names: str, given, acc) -> None:
        """Adds up the four sums of a tile and the residual. The norm of a row needs all tiles: its
        scale is applied here, its inverse root where the row has been multiplied."""
        columns = pl.ds(self.shares.columns(p), UNIT)
        alone = self.plan.alone
        exchange = self.through_global_memory if alone else self.through_shared_memory
        summed = exchange(p, acc)
        outputs = [self.refs[names + name] for name in ("total", "scaled", "squares")]
        for group in range(self.plan.groups):
            rows = pl.ds(group * GROUP, GROUP)
            pl.when(self.mine == group)(
                lambda: self.add_rows(rows, columns, group, summed, given, *outputs)  # noqa: B023
            )

    def through_shared_memory(self, p: int, acc):
        """Every warpgroup sends the rows of a group to the block that finishes them."""
        mailbox = self.plan.mailbox
        for group in range(self.plan.groups):
            rows = acc[:, group * GROUP : (group + 1) * GROUP]
            box, block = divmod(group, PAIR)
            mailbox.write(self.scratch, box, self.mine, block, [rows], [ACC])

        def summed(group: int, layout):
            notes = mailbox.read(self.scratch, group // PAIR, p // 2, [(UNIT, GROUP)], [ACC])
            turned = self.scratch["turned"].at[self.warpgroup]
            turned.T[...] = plgpu.layout_cast(sum(rows for (rows,) in notes), TURNED)
            return load(turned, layout)

        return summed

    def through_global_memory(self, p: int, acc):
        """The same for the interpreter, which has no sending."""
        columns = pl.ds(self.shares.columns(p), UNIT)
        sums = self.refs["attention_parts" if p == 0 else "mlp_parts"]
        store(sums.at[self.mine, :, columns].T, plgpu.layout_cast(acc, TURNED))
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.scratch["met"])
        plgpu.barrier_wait(self.scratch["met"])
        return lambda group, layout: sum(
            load(sums.at[i, pl.ds(group * GROUP, GROUP), columns], layout) for i in range(FINISHERS)
        )

    def add_rows(self, rows, columns, group, summed, residual, total, scaled, squares) -> None:
        dtype, layout, (x, scale) = self.plan.dtype, rows_in_lanes(UNIT), residual
        product = summed(group, layout)
        added = (x.astype(jnp.float32) + product.astype(dtype).astype(jnp.float32)).astype(dtype)
        wide = added.astype(jnp.float32)
        store(total.at[rows, columns], added)
        scale = lax.broadcast_in_dim(scale.astype(jnp.float32), wide.shape, [1])
        store(scaled.at[rows, columns], (wide * scale).astype(dtype))
        store(squares.at[self.shares.pair, rows], (wide * wide).sum(axis=1))

    def inverse(self):
        """One over the root mean square of every row, which `find_inverse` finds."""
        plgpu.barrier_wait(self.scratch["inverse_here"])
        return load(self.scratch["inverse"], PER_ROW)

    def find_inverse(self, p: int) -> None:
        squares = {1: "attention_squares", 3: "squares"}.get(p)
        if squares is None:
            return
        tiles = self.refs[squares]
        total = sum(load(tiles.at[i], PER_ROW) for i in range(tiles.shape[0]))
        mean = total * (1.0 / self.plan.shape.hidden)
        self.scratch["inverse"][...] = lax.rsqrt(mean + self.plan.eps)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.scratch["inverse_here"])


def times_rows(product, factors):
    return product * lax.broadcast_in_dim(factors, product.shape, [1])
