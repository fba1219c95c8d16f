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
from pallas_kernels.dense_chain.plan import CONSUMERS, DOWN, EIGHT, PAIR, STAGE
from pallas_kernels.dense_chain.rows import PER_ROW, TRANSPOSED
from pallas_kernels.dense_chain.shape import BARRIERS, NEIGHBOURS, UNIT
from pallas_kernels.fp8_product import BLOCK
from pallas_kernels.fp8_product.chunk import no_totals
from pallas_kernels.fp8_product.in_flight import begin_product, wait_and_add
from pallas_kernels.fp8_product.rounding import PIECES, eight_in_8_bits
from pallas_kernels.gated_product.kernel import gated_in_16_bits
from pallas_kernels.jax_internals import pl, plgpu, store
from pallas_kernels.tiles import load

REGISTERS = {"weights": 32, "rows": 48, "products": 216}
"""Registers of a thread that loads weights or rows, or that multiplies. A multiprocessor has 65,536
of them, and two warpgroups of 128 threads multiply."""
MOST_AT_ONCE = 32
"""Rows that are multiplied at once. The products of more do not fit into registers beside the sums
of gate and up. If the warpgroups that load give up registers, those of twice as many do."""
TILES = BLOCK // UNIT
"""Tiles of a piece."""


class RoundedChain(Fp8Chain):
    def multiply_all(self) -> None:
        self.limit_registers("products", "increase")
        super().multiply_all()

    def load_weights(self) -> None:
        self.limit_registers("weights", "decrease")
        super().load_weights()

    def load_rows(self) -> None:
        self.limit_registers("rows", "decrease")
        super().load_rows()

    def limit_registers(self, work: str, action) -> None:
        if self.plan.moves_registers:
            plgpu.set_max_registers(REGISTERS[work], action=action)

    # Products

    def tile(self, p: int, finish) -> None:
        """Multiplies this warpgroup's rows of a tile and passes their sums to `finish`."""
        columns = self.shares.columns(p)

        def scales_of(block):
            return tuple(self.scale_of(p, columns, block + i) for i in range(CONSUMERS))

        def added(sums, weights, tile, scales):
            for i, scale in enumerate(scales):
                chunk = weights * CONSUMERS + i
                sums = self.with_chunk(sums, chunk, tile + i, self.rows.own, scale)
            return sums

        finish(self.after_steps(p, no_totals(self.plan.rows_each), scales_of, added))

    def nothing(self) -> Any:
        return no_totals(self.plan.shape.tokens)

    def added(self, sums: Any, weights, tile, scale) -> Any:
        chunk, rows = weights * CONSUMERS + self.warpgroup, pl.ds(0, self.plan.shape.tokens)
        return self.with_chunk(sums, chunk, tile, rows, scale)

    def with_chunk(self, sums: Any, chunk, tile, rows, scale) -> Any:
        """The sums of some rows, plus their products with a chunk of weights."""
        interpreted, found = self.plan.one_phase, []
        weights = self.scratch["weights"].at[chunk]
        tile, row_scales = (self.scratch[name].at[tile, rows] for name in ("tiles", "row_scales"))
        most = MOST_AT_ONCE * (2 if self.plan.moves_registers else 1)
        for first in range(0, sums.shape[1], most):
            part = pl.ds(first, min(most, sums.shape[1] - first))
            products = begin_product(weights, tile.at[part], interpreted)
            scales = (load(row_scales.at[part], PER_ROW) * scale,)
            of_part = sums[:, first : first + part.size]
            found.append(wait_and_add(of_part, products, scales, 1, interpreted))
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
        """Rounds this warpgroup's share: pieces of some rows."""
        pieces, workers = self.plan.shape.attended // BLOCK, self.plan.blocks * CONSUMERS
        at_once = rows_at_once(self.plan.shape.tokens, pieces, workers)
        shares = pieces * (self.plan.shape.tokens // at_once)
        worker = self.shares.block * CONSUMERS + self.warpgroup

        def round_share(share) -> None:
            first, piece = lax.div(share, pieces) * at_once, lax.rem(share, pieces)
            rows, inputs = pl.ds(first, at_once), pl.ds(piece * BLOCK, BLOCK)
            attended = load(self.refs["attended"].at[rows, inputs], PIECES)
            self.write_piece(0, piece, rows, attended)

        for share in range(0, shares, workers):
            pl.when(share + worker < shares)(partial(round_share, share + worker))

    def round_tiles(self, p: int) -> None:
        """Rounds half of the rows that this warpgroup has finished, of its tile of product p and
        the neighbouring one. Those with the other tile round the other half: of each group, or
        every second group."""
        stage, piece = STAGE[p] + 1, lax.div(self.shares.tile(p), TILES)
        of_tile = lax.rem(self.shares.tile(p), TILES)
        if not self.plan.one_phase:
            grid_barrier.wait(self.neighbours(p), 0, self.refs["calls"], TILES)
        _, norm, names = ADDED[STAGE[p]]
        inputs = pl.ds(piece * BLOCK, BLOCK)

        def round_share(rows) -> None:
            wide = load(self.refs[names + "total"].at[rows, inputs], PIECES).astype(jnp.float32)
            scale = load(self.refs[norm].at[inputs], PIECES.reduce(0)).astype(jnp.float32)
            scaled = wide * lax.broadcast_in_dim(scale, wide.shape, [1])
            self.write_piece(stage, piece, rows, scaled.astype(self.plan.dtype))

        half = self.plan.group // TILES
        for i in range(self.plan.groups_each):
            rows, finishes = self.rows.group(i), self.rows.finishes(i)
            if half % EIGHT:
                turn = lax.rem(lax.div(self.rows.first + i, PAIR), TILES)
                pl.when(finishes & (turn == of_tile))(partial(round_share, rows))
            else:
                share = pl.ds(rows.start + of_tile * half, half)
                pl.when(finishes)(partial(round_share, share))

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

    def write_piece(self, stage: int, piece, places, rows) -> None:
        in_8_bits, scales = eight_in_8_bits(rows.astype(jnp.float32))
        numbers = self.refs[ROWS[stage] + NUMBERS].at[places, pl.ds(piece * BLOCK, BLOCK)]
        store(numbers, in_8_bits)
        store(self.refs[ROWS[stage] + ROW_SCALES].at[piece, places], scales)

    def write_gated(self, *sums) -> None:
        """Gates in 16 bits go through shared memory, from which they are rounded row by row."""
        gated, written = self.scratch["gated"], self.scratch["gated_written"]
        in_16_bits = gated_in_16_bits(*self.normed(sums))
        own = gated.at[:, pl.ds(self.warpgroup * UNIT, UNIT)]
        store(own.T, plgpu.layout_cast(in_16_bits, TRANSPOSED))
        plgpu.commit_smem()
        plgpu.barrier_arrive(written)
        plgpu.barrier_wait(written)

        at_once = rows_at_once(self.plan.shape.tokens, 1, CONSUMERS)
        first = self.warpgroup * at_once

        def round_share() -> None:
            rows = pl.ds(pl.multiple_of(first, at_once), at_once)
            self.write_piece(STAGE[DOWN], self.shares.block, rows, load(gated.at[rows], PIECES))

        pl.when(first < self.plan.shape.tokens)(round_share)


def rows_at_once(tokens: int, pieces: int, workers: int) -> int:
    """How many rows of a piece a worker rounds at once, so that each has one share if possible."""
    sizes = [size for size in range(EIGHT, tokens + 1, EIGHT) if tokens % size == 0]
    return next((size for size in sizes if pieces * (tokens // size) <= workers), EIGHT)
