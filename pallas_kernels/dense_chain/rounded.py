"""The chain with matrices and rows in 8 bits, which the tensor core multiplies as they are.

A piece of 128 inputs of a row shares a scale, so it is rounded when all of it is known:

    attended rows    before the first product, a share by each warpgroup
    residual stream  by the warpgroups that have finished the piece's two tiles, which wait for each
                     other only: the norm's second factor, for which all tiles would have to be
                     known, is applied after the product, as with rows in 16 bits
    gated rows       by the thread block that has computed the whole piece

The tensor core keeps about 14 bits of a sum, so it adds up only 128 inputs at a time. The products
are then multiplied by the scales of the row's piece and of the weights' block, and added to sums in
float32.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.dense_chain import grid_barrier
from pallas_kernels.dense_chain.fp8 import Fp8Chain
from pallas_kernels.dense_chain.kernel import ADDED
from pallas_kernels.dense_chain.loading import ROWS
from pallas_kernels.dense_chain.phases import NUMBERS, ROW_SCALES, Phase
from pallas_kernels.dense_chain.plan import (
    CONSUMERS,
    DOWN,
    GROUP,
    PAIR,
    STAGE,
    UNIT,
)
from pallas_kernels.dense_chain.rows import PER_ROW, TRANSPOSED
from pallas_kernels.dense_chain.shape import BARRIERS, NEIGHBOURS
from pallas_kernels.fp8_product import BLOCK
from pallas_kernels.fp8_product.chunk import no_totals
from pallas_kernels.fp8_product.in_flight import begin_product, wait_and_add
from pallas_kernels.fp8_product.rounding import PIECES, eight_in_8_bits
from pallas_kernels.gated_product.kernel import gated_in_16_bits
from pallas_kernels.jax_internals import pl, plgpu, store
from pallas_kernels.tiles import load

MOST_AT_ONCE = 32
"""Rows that are multiplied at once. The products of more do not fit into registers beside the sums
of gate and up."""
TILES = BLOCK // UNIT
"""Tiles of a piece."""


class RoundedChain(Fp8Chain):
    # Products

    def nothing(self) -> Any:
        return no_totals(self.plan.shape.tokens)

    def added(self, sums: Any, weights, tile, scale) -> Any:
        chunk = self.scratch["weights"].at[weights * CONSUMERS + self.warpgroup]
        interpreted, found = self.plan.one_phase, []
        for first in range(0, self.plan.shape.tokens, MOST_AT_ONCE):
            last = min(first + MOST_AT_ONCE, self.plan.shape.tokens)
            rows = pl.ds(first, last - first)
            products = begin_product(chunk, self.scratch["tiles"].at[tile, rows], interpreted)
            scales = (load(self.scratch["row_scales"].at[tile, rows], PER_ROW) * scale,)
            found.append(wait_and_add(sums[:, first:last], products, scales, 1, interpreted))
        return jnp.concatenate(found, axis=1)

    def totals(self, p: int, column, sums):
        return sums

    # Rounding

    def round_rows(self, phase: Phase) -> None:
        if phase.stage == 0:
            self.round_attended()
        elif phase in self.plan.launches:
            for p in self.plan.products_of(Phase(phase.stage - 1)):
                pl.when(self.shares.has(p))(partial(self.round_tiles, p))

    def round_attended(self) -> None:
        """Rounds this warpgroup's share: whole pieces of eight rows."""
        pieces = self.plan.shape.attended // BLOCK
        shares, workers = pieces * self.plan.groups, self.plan.blocks * CONSUMERS
        worker = self.shares.block * CONSUMERS + self.warpgroup

        def round_share(share) -> None:
            eight, piece = lax.div(share, pieces) * GROUP, lax.rem(share, pieces)
            rows, inputs = pl.ds(eight, GROUP), pl.ds(piece * BLOCK, BLOCK)
            attended = load(self.refs["attended"].at[rows, inputs], PIECES)
            self.write_piece(0, piece, rows, attended)

        for share in range(0, shares, workers):
            pl.when(share + worker < shares)(partial(round_share, share + worker))

    def round_tiles(self, p: int) -> None:
        """Rounds half of the rows that this warpgroup has finished, of its tile of product p and
        the neighbouring one. Those with the other tile round the other half."""
        stage, piece = STAGE[p] + 1, lax.div(self.shares.tile(p), TILES)
        of_tile = lax.rem(self.shares.tile(p), TILES)
        if not self.plan.one_phase:
            grid_barrier.wait(self.neighbours(p), 0, self.refs["calls"], TILES)
        _, norm, names = ADDED[STAGE[p]]
        inputs = pl.ds(piece * BLOCK, BLOCK)

        def round_group(i: int) -> None:
            rows = self.rows.group(i)
            wide = load(self.refs[names + "total"].at[rows, inputs], PIECES).astype(jnp.float32)
            scale = load(self.refs[norm].at[inputs], PIECES.reduce(0)).astype(jnp.float32)
            scaled = wide * lax.broadcast_in_dim(scale, wide.shape, [1])
            self.write_piece(stage, piece, rows, scaled.astype(self.plan.dtype))

        for i in range(self.plan.groups_each):
            turn = lax.rem(lax.div(self.rows.first + i, PAIR), TILES)
            pl.when(self.rows.finishes(i) & (turn == of_tile))(partial(round_group, i))

    def add_to_stream(self, p: int) -> None:
        super().add_to_stream(p)
        if not self.plan.one_phase:
            grid_barrier.arrive(self.neighbours(p), 0)

    def neighbours(self, p: int):
        """The barrier of the two warpgroups that finish the same rows of a piece of product p."""
        finisher = self.shares.half * CONSUMERS + self.warpgroup
        of_product = STAGE[p] // 2 * (NEIGHBOURS // 2)
        place = lax.div(self.shares.tile(p), TILES) * (PAIR * CONSUMERS) + finisher
        return self.refs["counters"].at[pl.ds(BARRIERS + of_product + place, 1)]

    def write_piece(self, stage: int, piece, eight, rows) -> None:
        in_8_bits, scales = eight_in_8_bits(rows.astype(jnp.float32))
        numbers = self.refs[ROWS[stage] + NUMBERS].at[eight, pl.ds(piece * BLOCK, BLOCK)]
        store(numbers, in_8_bits)
        store(self.refs[ROWS[stage] + ROW_SCALES].at[piece, eight], scales)

    def write_gated(self, *sums) -> None:
        """Gates in 16 bits go through shared memory, from which they are rounded row by row."""
        gated, written = self.scratch["gated"], self.scratch["gated_written"]
        in_16_bits = gated_in_16_bits(*self.normed(sums))
        own = gated.at[:, pl.ds(self.warpgroup * UNIT, UNIT)]
        store(own.T, plgpu.layout_cast(in_16_bits, TRANSPOSED))
        plgpu.commit_smem()
        plgpu.barrier_arrive(written)
        plgpu.barrier_wait(written)

        def round_group(group: int) -> None:
            eight = pl.ds(group * GROUP, GROUP)
            of_group = load(gated.at[eight], PIECES)
            self.write_piece(STAGE[DOWN], self.shares.block, eight, of_group)

        for group in range(self.plan.groups):
            pl.when(self.warpgroup == group % CONSUMERS)(partial(round_group, group))
