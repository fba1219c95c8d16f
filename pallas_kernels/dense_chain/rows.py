"""What happens to rows from one product to the next: sums, residual, norm."""

import dataclasses
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dense_chain.loading import Shares
from pallas_kernels.dense_chain.plan import GROUP, PAIR, UNIT, Plan
from pallas_kernels.tiles import load, rows_in_lanes, store

ACC = plgpu.Layout.WGMMA
TURNED = plgpu.Layout.WGMMA_TRANSPOSED
PER_ROW = ACC.reduce(0)


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of one warpgroup, in groups of eight. Of a tile whose inputs a pair of blocks has
    shared, the blocks take turns in finishing groups: each sends its sums of those that the other
    one finishes."""

    plan: Plan
    refs: dict[str, Any]
    scratch: dict[str, Any]
    shares: Shares
    warpgroup: Any

    @property
    def first(self):
        """Index of its first group."""
        return self.warpgroup * (self.plan.groups - self.plan.groups_each)

    @property
    def mine(self):
        """The rows that it multiplies."""
        return pl.ds(pl.multiple_of(self.first * GROUP, GROUP), self.plan.groups_each * GROUP)

    def group(self, i: int):
        """The rows of its i-th group."""
        return pl.ds((self.first + i) * GROUP, GROUP)

    def owns(self, i: int):
        """Whether it hands on its i-th group: one that is multiplied twice is the other's."""
        return (self.warpgroup == 0) | (i >= self.plan.twice)

    def finisher(self, i: int):
        """Which block of the pair finishes its i-th group."""
        return lax.rem(self.first + i, PAIR)

    def residual(self, p: int, x: str, norm: str):
        """Inputs of `add` that exist already, loaded early so that `add` does not wait for them."""
        columns, layout = pl.ds(self.shares.columns(p), UNIT), rows_in_lanes(UNIT)
        skipped = lax.rem(self.first + self.shares.half, PAIR)

        def rows_of(turn: int):
            group = jnp.minimum(self.first + skipped + turn * PAIR, self.plan.groups - 1)
            return load(self.refs[x].at[pl.ds(group * GROUP, GROUP), columns], layout)

        turns = range(-(-self.plan.groups_each // PAIR))
        return [rows_of(turn) for turn in turns], load(
            self.refs[norm].at[columns], layout.reduce(0)
        )

    def add(self, p: int, names: str, residual, acc) -> None:
        """Adds up the two sums of a tile and the residual. The norm of a row needs all tiles: its
        scale is applied here, its inverse root where the row has been multiplied."""
        columns = pl.ds(self.shares.columns(p), UNIT)
        exchange = self.by_global_memory if self.plan.alone else self.by_mail
        both = exchange(p, acc)
        outputs = [self.refs[names + name] for name in ("total", "scaled", "squares")]
        for i in range(self.plan.groups_each):
            finish = partial(self.add_group, i, columns, partial(both, i), residual, *outputs)
            pl.when(self.owns(i) & (self.finisher(i) == self.shares.half))(finish)

    def by_mail(self, p: int, acc):
        """Sends what the other block finishes; returns what adds its sum to a group that stays."""
        mailbox = self.plan.mailbox
        box = lambda i: lax.div(self.first + i, PAIR)
        for i in range(self.plan.groups_each):
            for block in range(PAIR):
                there = (self.finisher(i) == block) & (self.shares.half != block)
                send = partial(mailbox.write, self.scratch, box(i), 0, block, [part(acc, i)], [ACC])
                pl.when(self.owns(i) & there)(send)

        def both(i: int, layout):
            notes = mailbox.read(self.scratch, box(i), p // 2, [(UNIT, GROUP)], [ACC])
            turned = self.scratch["turned"].at[self.warpgroup]
            turned.T[...] = plgpu.layout_cast(part(acc, i) + notes[0][0], TURNED)
            return load(turned, layout)

        return both

    def by_global_memory(self, p: int, acc):
        """The same for the interpreter, which has no mail."""
        sums = self.refs["attention_parts" if p == 0 else "mlp_parts"]
        columns = pl.ds(self.shares.columns(p), UNIT)
        self.store_groups(sums.at[self.shares.half], columns, acc)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.scratch["met"])
        plgpu.barrier_wait(self.scratch["met"])
        return lambda i, layout: sum(
            load(sums.at[half, self.group(i), columns], layout) for half in range(PAIR)
        )

    def store_groups(self, target, columns, acc) -> None:
        for i in range(self.plan.groups_each):
            turned = plgpu.layout_cast(part(acc, i), TURNED)
            pl.when(self.owns(i))(partial(store, target.at[self.group(i), columns].T, turned))

    def add_group(self, i: int, columns, both, residual, total, scaled, squares) -> None:
        dtype, layout, rows = self.plan.dtype, rows_in_lanes(UNIT), self.group(i)
        residuals, scale = residual
        product, x = both(layout).astype(dtype), residuals[i // PAIR]
        added = (x.astype(jnp.float32) + product.astype(jnp.float32)).astype(dtype)
        wide = added.astype(jnp.float32)
        store(total.at[rows, columns], added)
        scale = lax.broadcast_in_dim(scale.astype(jnp.float32), wide.shape, [1])
        store(scaled.at[rows, columns], (wide * scale).astype(dtype))
        store(squares.at[self.shares.pair, rows], (wide * wide).sum(axis=1))

    def write_qkv(self, acc) -> None:
        normed = times_rows(acc, self.inverse(self.mine)).astype(self.plan.dtype)
        self.store_groups(self.refs["next_qkv"], pl.ds(self.shares.columns(3), UNIT), normed)

    def inverse(self, rows):
        """One over the root mean square of some rows, which `find_inverse` finds."""
        plgpu.barrier_wait(self.scratch["inverse_here"])
        return load(self.scratch["inverse"].at[rows], PER_ROW)

    def find_inverse(self, p: int) -> None:
        """Eight tiles at a time, which is one load per thread. So squares have room for the most
        rows that there may be, and where a call has fewer the rest is anything."""
        squares = {1: "attention_squares", 3: "squares"}.get(p)
        if squares is None:
            return
        tiles, by_eights = self.refs[squares], range(0, self.refs[squares].shape[0], GROUP)
        eights = (load(tiles.at[pl.ds(i, GROUP)], rows_in_lanes(UNIT)) for i in by_eights)
        turned = self.scratch["turned"].at[0]
        store(turned, sum(eights))
        mean = load(turned.T, ACC).sum(axis=1) * (1.0 / self.plan.shape.hidden)
        self.scratch["inverse"][...] = lax.rsqrt(mean + self.plan.eps)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.scratch["inverse_here"])


def times_rows(product, factors):
    return product * lax.broadcast_in_dim(factors, product.shape, [1])


def part(acc, i: int):
    """The i-th group of a warpgroup's sums, which have a row per column."""
    return acc[:, i * GROUP : (i + 1) * GROUP]
