"""The epilogues: what is done with the rows (tokens) between two products: sums, residual, norm."""

import dataclasses
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.dense_chain.loading import Shares
from pallas_kernels.dense_chain.partners import Partners
from pallas_kernels.dense_chain.plan import (
    EIGHT,
    GATE_UP,
    MORE_DOWN,
    MORE_OUT,
    NEXT_QKV,
    PAIR,
    STAGE,
    Plan,
    boxes_of_tile,
)
from pallas_kernels.dense_chain.shape import UNIT
from pallas_kernels.exchange.order import sum_in_order
from pallas_kernels.jax_internals import pl, plgpu, store
from pallas_kernels.tiles import load, rows_in_lanes

ACC = plgpu.Layout.WGMMA
TRANSPOSED = plgpu.Layout.WGMMA_TRANSPOSED
PER_ROW = ACC.reduce(0)


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of one warpgroup, in groups.

    If the two thread blocks of a pair have split a tile's inputs, one finishes the even groups and
    the other the odd ones. Each sends its sums of the groups that the other finishes.
    """

    plan: Plan
    refs: dict[str, Any]
    scratch: dict[str, Any]
    shares: Shares
    warpgroup: Any

    @property
    def first(self):
        """Index of this warpgroup's first group."""
        return self.warpgroup * (self.plan.groups - self.plan.groups_each)

    @property
    def own(self):
        """The rows that this warpgroup multiplies."""
        first = pl.multiple_of(self.first * self.plan.group, self.plan.group)
        return pl.ds(first, self.plan.rows_each)

    def group(self, i: int):
        """The rows of this warpgroup's i-th group."""
        return self.rows_of(self.first + i)

    def rows_of(self, group):
        return pl.ds(group * self.plan.group, self.plan.group)

    def group_of(self, acc, i: int):
        """The i-th group of a warpgroup's accumulator, which is transposed: [columns, rows]."""
        return acc[:, i * self.plan.group : (i + 1) * self.plan.group]

    def stores(self, i: int):
        """Whether this warpgroup stores its i-th group. Of a group that both multiply, only the
        first one stores the result."""
        return (self.warpgroup == 0) | (i >= self.plan.repeated_groups)

    def finisher(self, i: int):
        """The thread block of the pair that finishes this warpgroup's i-th group."""
        return lax.rem(self.first + i, PAIR)

    def residual(self, p: int, x: str, norm: str):
        """Residual rows and norm scales for `add`, loaded before the product to hide the wait."""
        columns, layout = pl.ds(self.shares.columns(p), UNIT), rows_in_lanes(UNIT)
        first_finished = lax.rem(self.first + self.shares.half, PAIR)

        def residual_of(k: int):
            """The residual rows of the k-th group that this thread block finishes."""
            group = jnp.minimum(self.first + first_finished + k * PAIR, self.plan.groups - 1)
            return load(self.refs[x].at[self.rows_of(group), columns], layout)

        residuals = [residual_of(k) for k in range(-(-self.plan.groups_each // PAIR))]
        return residuals, load(self.refs[norm].at[columns], layout.reduce(0))

    def add(self, p: int, names: str, residual, acc) -> None:
        """Adds up the pair's two sums of a tile and the residual, and applies the norm's scale.

        The norm's other factor, one over the root mean square, needs all tiles of a row. It is
        applied to the result of the next product.
        """
        columns = pl.ds(self.shares.columns(p), UNIT)
        exchange = self.by_global_memory if self.plan.one_phase else self.by_mailbox
        pair_sum = exchange(p, acc)
        if self.plan.layout is not None:
            pair_sum = self.over_partners(p, pair_sum)
        for i in range(self.plan.groups_each):
            finish = partial(self.add_group, p, names, i, columns, partial(pair_sum, i), residual)
            pl.when(self.finishes(i))(finish)

    def finishes(self, i: int):
        """Whether this warpgroup of this thread block finishes its i-th group."""
        return self.stores(i) & (self.finisher(i) == self.shares.half)

    def over_partners(self, p: int, pair_sum):
        """Sends the groups that this thread block finishes to the other GPUs.

        Returns a function that adds up what all GPUs have sent of a group.
        """
        partners = Partners(self.plan, self.refs, STAGE[p], self.shares.tile(p), self.shares.block)
        of_pair = lambda i: pair_sum(i, rows_in_lanes(UNIT))
        if self.plan.one_phase:
            return lambda i, layout: sum_in_order(partners.arrived(self.first + i, of_pair(i)))
        for i in range(self.plan.groups_each):
            send = lambda i=i: partners.send(self.first + i, of_pair(i))
            pl.when(self.finishes(i))(send)
        return lambda i, layout: sum_in_order(partners.received(self.first + i))

    def by_mailbox(self, p: int, acc):
        """Sends the groups that the other thread block finishes.

        Returns a function that adds the other's sum to a group that this one finishes.
        """
        mailbox = self.plan.mailbox
        of_tile = boxes_of_tile(self.plan.shape.tokens, self.plan.group)
        later = of_tile if p in (MORE_OUT, MORE_DOWN) else 0
        box = lambda i: lax.div(self.first + i, PAIR) + later
        for i in range(self.plan.groups_each):
            for block in range(PAIR):
                is_target = (self.finisher(i) == block) & (self.shares.half != block)
                write = partial(mailbox.write, self.scratch, box(i), 0, block)
                send = partial(write, [self.group_of(acc, i)], [ACC])
                pl.when(self.stores(i) & is_target)(send)

        def pair_sum(i: int, layout):
            shapes = [(UNIT, self.plan.group)]
            [[other]] = mailbox.read(self.scratch, box(i), STAGE[p] // 2, shapes, [ACC])
            transposed = self.scratch["transposed"].at[self.warpgroup]
            transposed.T[...] = plgpu.layout_cast(self.group_of(acc, i) + other, TRANSPOSED)
            return load(transposed, layout)

        return pair_sum

    def by_global_memory(self, p: int, acc):
        """The same for the interpreter, which has no mailbox."""
        sums = self.refs["attention_parts" if STAGE[p] == 0 else "mlp_parts"]
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
            transposed = plgpu.layout_cast(self.group_of(acc, i), TRANSPOSED)
            when_stored = pl.when(self.stores(i))
            when_stored(partial(store, target.at[self.group(i), columns].T, transposed))

    def add_group(self, p: int, names: str, i: int, columns, pair_sum, residual) -> None:
        dtype, layout, rows = self.plan.dtype, rows_in_lanes(UNIT), self.group(i)
        residuals, scale = residual
        product, x = pair_sum(layout).astype(dtype), residuals[i // PAIR]
        added = (x.astype(jnp.float32) + product.astype(jnp.float32)).astype(dtype)
        wide = added.astype(jnp.float32)
        store(self.refs[names + "total"].at[rows, columns], added)
        squares = self.refs[names + "squares"].at[self.shares.tile(p), rows]
        store(squares, (wide * wide).sum(axis=1))
        if not self.plan.rounds:
            scale = lax.broadcast_in_dim(scale.astype(jnp.float32), wide.shape, [1])
            scaled = self.refs[names + "scaled"].at[rows, columns]
            store(scaled, (wide * scale).astype(dtype))

    def write_qkv(self, p: int, acc) -> None:
        """Writes a tile of the next qkv. For a second tile the inverse is known already."""
        inverse = self.inverse if p == NEXT_QKV else self.known_inverse
        normed = times_rows(acc, inverse(self.own)).astype(self.plan.dtype)
        self.store_groups(self.refs["next_qkv"], pl.ds(self.shares.columns(p), UNIT), normed)

    def inverse(self, rows):
        """One over the root mean square of these rows; waits for `compute_inverse`."""
        plgpu.barrier_wait(self.scratch["inverse_ready"])
        return self.known_inverse(rows)

    def known_inverse(self, rows):
        return load(self.scratch["inverse"].at[rows], PER_ROW)

    def compute_inverse(self, p: int) -> None:
        """Computes one over the root mean square of all rows for product p, if it needs it.

        The sums of squares of UNIT rows are read eight tiles at a time, one load per thread. Rows
        beyond the call's tokens hold garbage.
        """
        squares = {GATE_UP: "attention_squares", NEXT_QKV: "squares"}.get(p)
        if squares is None:
            return
        tiles, starts = self.refs[squares], range(0, self.refs[squares].shape[0], EIGHT)
        for i in range(self.plan.known_tokens // UNIT):
            rows = pl.ds(i * UNIT, UNIT)
            eights = (load(tiles.at[pl.ds(j, EIGHT), rows], rows_in_lanes(UNIT)) for j in starts)
            transposed = self.scratch["transposed"].at[i, pl.ds(0, EIGHT)]
            store(transposed, sum(eights))
            mean = load(transposed.T, ACC).sum(axis=1) * (1.0 / self.plan.shape.hidden)
            self.scratch["inverse"][rows] = lax.rsqrt(mean + self.plan.eps)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.scratch["inverse_ready"])


def times_rows(product, factors):
    return product * lax.broadcast_in_dim(factors, product.shape, [1])
