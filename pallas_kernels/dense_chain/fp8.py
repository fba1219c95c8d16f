"""The chain with matrices in 8 bits, whose weights are widened to 16 bits in registers.

With weights in 16 bits the two multiplying warpgroups use the same weights, each for its own rows.
Here that would widen every weight twice. Instead, each warpgroup multiplies weights of its own with
all rows: for gate and up its own columns, as with 16 bits; for the other products every second
block of inputs. There each has only a part of every sum, so afterwards they swap parts through
shared memory, and each gets the whole sums of its own rows.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.dense_chain.kernel import Chain
from pallas_kernels.dense_chain.loading import MATRICES, SCALES
from pallas_kernels.dense_chain.plan import CONSUMERS, DEPTH, GATE_UP, STAGE
from pallas_kernels.dense_chain.rows import ACC, TRANSPOSED
from pallas_kernels.dense_chain.shape import UNIT
from pallas_kernels.fp8_product import BLOCK
from pallas_kernels.fp8_product.chunk import Sums, add_product, no_sums, times_outputs
from pallas_kernels.jax_internals import pl, plgpu
from pallas_kernels.tiles import load, rounded_sum


class Fp8Chain(Chain):
    def tile(self, p: int, finish) -> None:
        """Multiplies a tile and passes the sums of this warpgroup's rows to `finish`."""
        columns = self.shares.columns(p)

        def scale_of(block):
            return self.scale_of(p, columns, block + self.warpgroup)

        def added(sums, weights, tile, scale):
            return self.added(sums, weights, tile + self.warpgroup, scale)

        sums = self.after_steps(p, self.nothing(), scale_of, added)
        finish(self.of_own_rows(self.totals(p, columns, sums)))

    def after_steps(self, p: int, sums, scales_of, added) -> Any:
        """The sums after all steps of a tile of product p.

        `scales_of(block)` are the scales of a step whose inputs begin with that block. They are
        loaded one step early. `added(sums, weights, tile, scales)` adds the products of a stage of
        weights with the rows from that tile on.
        """

        def scales_of_step(step):
            last = lax.max(self.shares.steps[p] - 1, 0)
            return scales_of(lax.div(self.shares.inputs(p) + lax.min(step, last) * DEPTH, BLOCK))

        def one_step(step, carried):
            sums, scales = carried
            next_scales = scales_of_step(step + 1)
            rows, weights = self.wait_for_rows(p, step), self.wait_for_weights(p, step)
            sums = added(sums, weights, rows * self.plan.row_tiles, scales)
            plgpu.barrier_arrive(self.scratch["weights_used"].at[weights])
            plgpu.barrier_arrive(self.scratch["rows_used"].at[rows])
            return sums, next_scales

        before = sums, scales_of_step(0)
        return lax.fori_loop(0, self.shares.steps[p], one_step, before)[0]

    def gate_and_up(self) -> None:
        plan, matrices = self.plan, (self.gate_column, self.up_column)
        steps = plan.shape.hidden // DEPTH

        def scales_of(block):
            block = lax.min(block, steps * plan.row_tiles - 1)
            return tuple(self.scale_of(GATE_UP, column, block) for column in matrices)

        def one_step(step, carried):
            rows = self.wait_for_rows(GATE_UP, step)

            def one_block(block, carried):
                sums, scales = list(carried[0]), carried[1]
                next_scales = scales_of(step * plan.row_tiles + block + 1)
                for i, scale in enumerate(scales):
                    weight_step = step * plan.gate_up_steps + block * len(matrices) + i
                    weights = self.wait_for_weights(GATE_UP, weight_step)
                    sums[i] = self.added(sums[i], weights, rows * plan.row_tiles + block, scale)
                    plgpu.barrier_arrive(self.scratch["weights_used"].at[weights])
                return tuple(sums), next_scales

            carried = lax.fori_loop(0, plan.row_tiles, one_block, carried)
            plgpu.barrier_arrive(self.scratch["rows_used"].at[rows])
            return carried

        before = (self.nothing(), self.nothing()), scales_of(0)
        sums, _ = lax.fori_loop(0, steps, one_step, before)
        self.write_gated(*map(self.totals, (GATE_UP, GATE_UP), matrices, sums))

    @property
    def gate_column(self):
        return self.shares.inner_unit(self.warpgroup) * UNIT

    @property
    def up_column(self):
        return self.gate_column + self.plan.shape.inner

    def nothing(self) -> Sums:
        return no_sums(self.plan.shape.tokens)

    def added(self, sums: Sums, weights, tile, scale) -> Sums:
        """The sums plus this warpgroup's chunk of a stage of weights times a tile of rows."""
        chunk = self.scratch["weights"].at[weights * CONSUMERS + self.warpgroup]
        return add_product(sums, chunk, self.scratch["tiles"].at[tile], scale, self.plan.one_phase)

    def scale_of(self, p: int, column, block):
        """The scale of a chunk; None if scales belong to outputs."""
        if self.plan.shape.scaled == "outputs":
            return None
        return self.refs[MATRICES[STAGE[p]] + SCALES][lax.div(column, BLOCK), block]

    def totals(self, p: int, column, sums: Sums):
        if self.plan.shape.scaled == "blocks":
            return sums.totals
        scales = self.refs[MATRICES[STAGE[p]] + SCALES].at[pl.ds(column, UNIT)]
        return times_outputs(sums.multiples, scales)

    def of_own_rows(self, totals):
        """The sums over both warpgroups, of the rows that this one finishes."""
        size, tokens = self.plan.rows_each, self.plan.shape.tokens
        halves = totals[:, :size], totals[:, tokens - size :]
        is_first, other = lax.broadcast(self.warpgroup == 0, halves[0].shape), 1 - self.warpgroup
        mine, others = jnp.where(is_first, *halves), jnp.where(is_first, *halves[::-1])
        swapped, ready = self.scratch["swapped"], self.scratch["swapped_ready"]
        swapped.at[other].T[...] = plgpu.layout_cast(others, TRANSPOSED)
        plgpu.commit_smem()
        plgpu.barrier_arrive(ready.at[other])
        plgpu.barrier_wait(ready.at[self.warpgroup])
        theirs = load(swapped.at[self.warpgroup].T, ACC)
        return rounded_sum(mine, theirs, ACC, self.plan.one_phase)
