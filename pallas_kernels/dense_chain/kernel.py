"""The body of the chain kernel: two warpgroups multiply, one loads weights and one loads rows."""

from functools import partial

import jax.numpy as jnp
from jax import lax

from pallas_kernels.dense_chain import grid_barrier
from pallas_kernels.dense_chain.loading import Shares, load_rows, load_weights
from pallas_kernels.dense_chain.partners import count_exchanges
from pallas_kernels.dense_chain.phases import Phase
from pallas_kernels.dense_chain.plan import (
    CHUNKS,
    CONSUMERS,
    GATE_UP,
    NEXT_QKV,
    PRODUCTS,
    STAGE,
    Plan,
)
from pallas_kernels.dense_chain.rows import TRANSPOSED, Rows, times_rows
from pallas_kernels.dense_chain.shape import UNIT
from pallas_kernels.jax_internals import Accumulator, pl, plgpu, store
from pallas_kernels.tiles import fence_async

ADDED = {0: ("x", "norm", "attention_"), 2: ("attention_total", "next_norm", "")}
"""What a stage adds its product to, the norm of the sum, and how names of its outputs begin."""


def run(plan: Plan, kind: "type[Chain]", names: tuple[str, ...], *refs, **scratch) -> None:
    scratch = plan.named_scratch(scratch)
    chain = kind(plan, dict(zip(names, refs)), scratch)
    if not plan.one_phase:
        plan.mailbox.init_barriers(scratch)
    pl.when(chain.warpgroup < CONSUMERS)(chain.multiply_all)
    pl.when(chain.warpgroup == CONSUMERS)(chain.load_weights)
    pl.when(chain.warpgroup == CONSUMERS + 1)(chain.load_rows)
    if not plan.one_phase:
        pl.when(chain.warpgroup >= CONSUMERS)(plan.mailbox.wait_for_barriers)


class Chain:
    """The work of one warpgroup: it multiplies, loads weights or loads rows."""

    def __init__(self, plan: Plan, refs, scratch):
        self.plan, self.refs, self.scratch = plan, refs, scratch
        self.shares, self.warpgroup = Shares(plan), lax.axis_index("warpgroup")
        self.rows = Rows(plan, self.refs, scratch, self.shares, self.warpgroup)

    def load_weights(self) -> None:
        load_weights(self.shares, self.refs, self.scratch)

    def load_rows(self) -> None:
        load_rows(
            self.shares,
            self.refs,
            self.scratch,
            self.wait_for_rows_of,
            self.rows.compute_inverse,
        )

    def multiply_all(self) -> None:
        if not self.plan.one_phase:
            self.plan.mailbox.wait_for_barriers()
        if self.plan.layout is not None and not self.plan.one_phase:
            count_exchanges(self.refs, self.shares.block, self.warpgroup)
        for phase in self.plan.phases:
            if phase.rounds:
                self.round_rows(phase)
            for p in self.plan.products_of(phase):
                pl.when(self.shares.active[p])(partial(self.multiply_product, p))
            if phase in self.plan.meetings and not self.plan.one_phase:
                grid_barrier.arrive(self.refs["counters"], self.plan.meetings.index(phase))

    def round_rows(self, phase: Phase) -> None:
        raise AssertionError("rows in 16 bits are multiplied as they are")

    def wait_for_rows_of(self, p: int) -> None:
        """Waits until all thread blocks have written the rows that product p multiplies."""
        before = self.plan.phase_before(Phase(STAGE[p]))
        if p == PRODUCTS[STAGE[p]][0] and before is not None and not self.plan.one_phase:
            barrier = self.plan.meetings.index(before)
            arrivals = self.plan.blocks * CONSUMERS
            grid_barrier.wait(self.refs["counters"], barrier, self.refs["calls"], arrivals)
            fence_async()

    def multiply_product(self, p: int) -> None:
        if p == GATE_UP:
            self.gate_and_up()
        elif STAGE[p] == STAGE[NEXT_QKV]:
            self.tile(p, lambda acc: self.rows.write_qkv(p, acc))
        else:
            self.add_to_stream(p)

    def add_to_stream(self, p: int) -> None:
        x, norm, names = ADDED[STAGE[p]]
        residual = self.rows.residual(p, x, norm)
        self.tile(p, lambda acc: self.rows.add(p, names, residual, acc))

    def gate_and_up(self) -> None:
        def product(gate_acc, up_acc) -> None:
            self.accumulate_gate_and_up(gate_acc, up_acc)
            self.write_gated(gate_acc[...], up_acc[...])

        rows = self.plan.rows_each if self.plan.is_narrow else self.plan.shape.tokens
        accumulator = Accumulator((UNIT, rows), jnp.float32)
        pl.run_scoped(product, accumulator, accumulator)

    def write_gated(self, *accs) -> None:
        columns = pl.ds(self.shares.inner_unit(self.warpgroup) * UNIT, UNIT)
        gate, up = self.normed(accs)
        gated = (gate / (1.0 + jnp.exp(-gate)) * up).astype(self.plan.dtype)
        if self.plan.is_narrow:
            self.rows.store_groups(self.refs["gated"], columns, gated)
        else:
            store(self.refs["gated"].at[:, columns].T, plgpu.layout_cast(gated, TRANSPOSED))

    def normed(self, accs) -> tuple:
        """Gate and up with the norm's second factor."""
        rows = self.rows.own if self.plan.is_narrow else pl.ds(0, self.plan.shape.tokens)
        inverse = self.rows.inverse(rows)
        return tuple(times_rows(acc, inverse) for acc in accs)

    # Products

    def tile(self, p: int, finish) -> None:
        """Multiplies this warpgroup's rows of a tile and passes the accumulator to `finish`."""
        own_rows = self.rows.own

        def product(acc) -> None:
            @pl.loop(0, self.shares.steps[p])
            def _(step):
                rows, weights = self.wait_for_rows(p, step), self.wait_for_weights(p, step)
                for i in range(CHUNKS):
                    self.multiply(acc, weights * CHUNKS + i, rows * CHUNKS + i, own_rows)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(self.scratch["weights_used"].at[weights])
                plgpu.barrier_arrive(self.scratch["rows_used"].at[rows])

            finish(acc[...])

        pl.run_scoped(product, Accumulator((UNIT, self.plan.rows_each), jnp.float32))

    def accumulate_gate_and_up(self, *accs) -> None:
        @pl.loop(0, self.shares.row_steps[GATE_UP])
        def _(step):
            rows, steps = self.wait_for_rows(GATE_UP, step), self.plan.gate_up_steps
            for i in range(steps):
                weights = self.wait_for_weights(GATE_UP, step * steps + i)
                self.multiply_gate_and_up(weights, rows, i, accs)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(self.scratch["weights_used"].at[weights])
            plgpu.barrier_arrive(self.scratch["rows_used"].at[rows])

    def multiply_gate_and_up(self, weights, rows, i: int, accs) -> None:
        """Multiplies by the i-th stage of weights for a stage of rows: this warpgroup's columns by
        all rows, or the columns that both share by its own rows."""
        if not self.plan.is_narrow:
            for j, acc in enumerate(accs):
                chunk = weights * CHUNKS + self.warpgroup * len(accs) + j
                self.multiply(acc, chunk, rows * CHUNKS + i, slice(None))
            return
        for k in range(CHUNKS // len(accs)):
            tile = rows * CHUNKS + i * (CHUNKS // len(accs)) + k
            for j, acc in enumerate(accs):
                self.multiply(acc, weights * CHUNKS + k * len(accs) + j, tile, self.rows.own)

    def wait_for_weights(self, p: int, step):
        """Waits until a step's weights are loaded; returns their pipeline stage."""
        stage = lax.rem(self.shares.starts[p] + step, self.plan.sizes.weight_stages)
        plgpu.barrier_wait(self.scratch["weights_loaded"].at[stage])
        return stage

    def wait_for_rows(self, p: int, step):
        """Waits until a step's rows are loaded; returns their pipeline stage."""
        stage = lax.rem(self.shares.row_starts[p] + step, self.plan.sizes.row_stages)
        plgpu.barrier_wait(self.scratch["rows_loaded"].at[stage])
        return stage

    def multiply(self, acc, weights, tile, rows) -> None:
        """Adds the product with one square of weights to the accumulator [UNIT, rows]."""
        tile = self.scratch["tiles"].at[tile, rows]
        plgpu.wgmma(acc, self.scratch["weights"].at[weights].T, tile.T)
