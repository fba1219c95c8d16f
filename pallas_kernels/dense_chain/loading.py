"""The two warpgroups that load, one for weights and one for rows.

Each prefetches as far ahead as its pipeline has stages. Weights never wait for an earlier product.
Rows that an earlier product computes wait until all thread blocks have written them.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.dense_chain.phases import NUMBERS, ROW_SCALES
from pallas_kernels.dense_chain.plan import (
    CONSUMERS,
    DEPTH,
    GATE_UP,
    MORE_DOWN,
    MORE_OUT,
    MORE_QKV,
    NEXT_QKV,
    PAIR,
    STAGE,
    Plan,
)
from pallas_kernels.dense_chain.shape import UNIT
from pallas_kernels.fp8_product import BLOCK
from pallas_kernels.jax_internals import pl, plgpu

MATRICES = "out", "gate_up", "down", "qkv"
ROWS = "attended", "attention_scaled", "gated", "scaled"
"""The matrix and the rows of each stage."""
SCALES = "_scales"
"""The scales of a matrix have its name with this suffix."""


class Shares:
    """This thread block's share of each product, in steps of one pipeline stage.

    Product p has `steps[p]` steps of weights and `row_steps[p]` steps of rows, 0 if this thread
    block has no part in it. Its first steps are `starts[p]` and `row_starts[p]`.
    """

    def __init__(self, plan: Plan):
        self.plan = plan
        self.pair, self.half = lax.axis_index("pair"), lax.axis_index("half")
        self.block = self.pair * PAIR + self.half
        self.active = {p: self.has(p) for p in plan.products}
        self.row_steps = {p: jnp.where(self.active[p], self._depths(p), 0) for p in plan.products}
        self.steps = {
            p: n * (plan.gate_up_steps if p == GATE_UP else 1) for p, n in self.row_steps.items()
        }
        self.row_starts, self.all_row_steps = starts(self.row_steps)
        self.starts, self.all_steps = starts(self.steps)

    @property
    def products(self) -> tuple[int, ...]:
        return self.plan.products

    def has(self, p: int):
        """Whether this thread block has a part in a product."""
        if p == GATE_UP:
            return self.inner_unit(0) < self.plan.shape.inner // UNIT
        if STAGE[p] == STAGE[NEXT_QKV]:
            return self.columns(p) < self.plan.shape.qkv
        return (self.pair < self.plan.tiles_at_once) & (self.columns(p) < self.plan.shape.hidden)

    def _depths(self, p: int):
        """Steps of rows of this thread block's part. A pair shares the inputs of out and down; the
        first of its thread blocks has one step more if their number is odd."""
        inputs = self.shared_inputs(p)
        if inputs is None:
            return self.plan.shape.hidden // DEPTH
        return lax.div(inputs // DEPTH + 1 - self.half, PAIR)

    def shared_inputs(self, p: int) -> int | None:
        """The inputs of a product if a pair shares them."""
        return {0: self.plan.shape.attended, 2: self.plan.shape.inner}.get(STAGE[p])

    def inputs(self, p: int) -> Any:
        """First input of product p that this thread block multiplies."""
        steps = (self.shared_inputs(p) or 0) // DEPTH
        return self.half * (-(-steps // PAIR) * DEPTH)

    def tile(self, p: int) -> Any:
        """Index of the UNIT columns of product p that this thread block multiplies."""
        if STAGE[p] == STAGE[NEXT_QKV]:
            return self.block + (self.plan.blocks if p == MORE_QKV else 0)
        return self.pair + (self.plan.tiles_at_once if p in (MORE_OUT, MORE_DOWN) else 0)

    def columns(self, p: int) -> Any:
        """First column of product p that this thread block multiplies."""
        return self.tile(p) * UNIT

    def inner_unit(self, warpgroup) -> Any:
        """Index of the UNIT columns of gate, and of up, that a warpgroup multiplies."""
        return self.block if self.plan.is_narrow else self.block * CONSUMERS + warpgroup


def starts(counts: dict[int, Any]) -> tuple[dict[int, Any], Any]:
    """Running totals: where each product starts, and the end of the last."""
    begins, total = {}, jnp.int32(0)
    for p, count in counts.items():
        begins[p], total = total, total + count
    return begins, total


def load_weights(shares: Shares, refs: dict[str, Any], scratch: dict[str, Any]) -> None:
    """Loads the weights of all products in order.

    It continues after the last step until all stages have been used, so that every arrival at a
    barrier has been waited for.
    """
    sizes, steps = shares.plan.sizes, shares.all_steps

    def wait(name: str, step) -> None:
        @pl.when((step >= 0) & (step < steps))
        def _():
            plgpu.barrier_wait(scratch[name].at[lax.rem(step, sizes.weight_stages)])

    def one_step(step, loaded):
        """All steps before `loaded` are known to have arrived."""
        wait("weights_used", step - sizes.weight_stages)
        now_loaded = jnp.minimum(jnp.maximum(loaded, step - sizes.in_flight + 1), steps)
        pl.loop(loaded, now_loaded)(lambda earlier: wait("weights_loaded", earlier))
        for p in shares.products:
            first, stage = shares.starts[p], lax.rem(step, sizes.weight_stages)
            in_product = (step >= first) & (step < first + shares.steps[p])
            load = partial(load_weight_stage, shares, refs, scratch, p)
            pl.when(in_product)(lambda: load(step - first, stage))  # noqa: B023
        return now_loaded

    lax.fori_loop(0, steps + sizes.weight_stages, one_step, jnp.int32(0))


def load_weight_stage(shares: Shares, refs, scratch, p: int, step, stage) -> None:
    place = place_of_fp8_chunk if shares.plan.fp8 else place_of_square
    chunks = shares.plan.chunks
    for i in range(chunks):
        plgpu.copy_gmem_to_smem(
            refs[MATRICES[STAGE[p]]].at[place(shares, p, step, i)],
            scratch["weights"].at[stage * chunks + i],
            scratch["weights_loaded"].at[stage],
        )


def place_of_square(shares: Shares, p: int, step, i: int) -> tuple:
    """Inputs and columns of the i-th square of a step."""
    if p == GATE_UP:
        inputs = (step * 2 + i // 2) * UNIT if shares.plan.is_narrow else step * UNIT
        column = shares.inner_unit(i // 2) * UNIT + (i % 2) * shares.plan.shape.inner
    else:
        inputs = shares.inputs(p) + step * DEPTH + i * UNIT
        column = shares.columns(p)
    return pl.ds(inputs, UNIT), pl.ds(column, UNIT)


def place_of_fp8_chunk(shares: Shares, p: int, step, warpgroup: int) -> tuple:
    """Columns and inputs of a warpgroup's chunk of a step."""
    if p == GATE_UP:  # gate and up take turns
        inputs = lax.div(step, 2) * BLOCK
        column = shares.inner_unit(warpgroup) * UNIT + lax.rem(step, 2) * shares.plan.shape.inner
    else:
        inputs = shares.inputs(p) + step * DEPTH + warpgroup * BLOCK
        column = shares.columns(p)
    return pl.ds(column, UNIT), pl.ds(inputs, BLOCK)


def places_of_rows(shares: Shares, refs, p: int, inputs) -> list[tuple[Any, str]]:
    """What product p multiplies, from an input on, and where in shared memory it belongs."""
    of_tile, stage = pl.ds(inputs, shares.plan.tile_inputs), STAGE[p]
    if not shares.plan.rounds:
        return [(refs[ROWS[stage]].at[:, of_tile], "tiles")]
    numbers, scales = refs[ROWS[stage] + NUMBERS], refs[ROWS[stage] + ROW_SCALES]
    return [
        (numbers.at[:, of_tile], "tiles"),
        (scales.at[lax.div(inputs, BLOCK)], "row_scales"),
    ]


def load_rows(shares: Shares, refs, scratch, wait_for, then) -> None:
    """Loads the rows of each product p after `wait_for(p)`, and calls `then(p)` after the loads."""
    stages, steps = shares.plan.sizes.row_stages, shares.all_row_steps
    width, tiles = shares.plan.tile_inputs, shares.plan.row_tiles

    def wait(step) -> None:
        plgpu.barrier_wait(scratch["rows_used"].at[lax.rem(step, stages)])

    for p in shares.products:
        wait_for(p)

        @pl.loop(0, shares.row_steps[p])
        def _(step):
            overall = shares.row_starts[p] + step  # noqa: B023
            pl.when(overall >= stages)(lambda: wait(overall - stages))
            stage = lax.rem(overall, stages)
            for i in range(tiles):
                inputs = shares.inputs(p) + step * DEPTH + i * width  # noqa: B023
                loaded = scratch["rows_loaded"].at[stage]
                for source, target in places_of_rows(shares, refs, p, inputs):  # noqa: B023
                    place = scratch[target].at[stage * tiles + i]
                    plgpu.copy_gmem_to_smem(source, place, loaded)

        pl.when(shares.active[p])(lambda: then(p))  # noqa: B023

    pl.loop(jnp.maximum(steps - stages, 0), steps)(wait)
