"""The body of the kernel for inputs in 8 bits.

The matrix instruction multiplies e4m3 by e4m3 from shared memory and keeps only about 14 bits of
its sums, so it adds up no more than the products of one step. Those are then scaled, by the row's
piece and the weights' block, and added to sums in float32.

As with inputs in 16 bits the weights are the left side, so few rows cost no more arithmetic than
they are, and any multiple of eight is a tile. Many rows could be the left side too, which would
need two scales per thread instead of one for every fourth row. But a wide tile uses these for two
products, and its registers hold the sums either way.
"""

import dataclasses
from typing import Any

from jax import lax

from pallas_kernels.fp8_product.chunk import UNIT, no_totals
from pallas_kernels.fp8_product.kernel import ThreadBlock
from pallas_kernels.fp8_product.plan_8_by_8 import PlanOf8By8
from pallas_kernels.fp8_product.widen import ACC
from pallas_kernels.jax_internals import pl, plgpu
from pallas_kernels.tiles import load, product_of, rounded_sum, scaled_sum, zeros_in_place_of

PER_ROW = ACC.reduce(0)


def run(plan: PlanOf8By8, x, weight, scales, row_scales, out, /, **scratch) -> None:
    block = ThreadBlockOf8By8(plan, x, weight, scales, out, scratch, row_scales)
    block.multiply(lax.axis_index("warpgroup"))


@dataclasses.dataclass(frozen=True)
class ThreadBlockOf8By8(ThreadBlock):
    plan: PlanOf8By8
    row_scales: Any
    """[row tiles, inputs / BLOCK, scales at once], or [rows]."""

    def operands(self, step) -> dict[str, Any]:
        operands = super().operands(step)
        if self.plan.blocks:
            row_tile = lax.axis_index("row_tile")
            operands["row_scales"] = self.row_scales.at[row_tile, self.block(step)]
        return operands

    def nothing(self):
        """Sums of each unit of outputs."""
        return (no_totals(self.plan.rows),) * self.plan.units

    def first_of(self, warpgroup, unit: int):
        """The first output of a unit, counted from the first of the tile."""
        return pl.multiple_of(warpgroup * (self.plan.units * UNIT) + unit * UNIT, UNIT)

    def add_step(self, step, warpgroup, sums):
        stage = lax.rem(step, self.plan.stages)
        scale = None
        if self.plan.blocks:
            scale = self.scale_of(step, self.first_of(warpgroup, 0))
        plgpu.barrier_wait(self.scratch["loaded"].at[stage])
        rows = self.scratch["rows"].at[stage]
        if scale is not None:
            scales = self.scratch["row_scales"].at[stage, pl.ds(0, self.plan.rows)]
            scale = load(scales, PER_ROW) * scale
        added, zeros, turn = [], no_totals(self.plan.rows), self.turn(warpgroup)
        for unit, totals in enumerate(sums):
            own = pl.ds(self.first_of(warpgroup, unit), UNIT)
            weights = self.scratch["weights"].at[stage, own]
            products = product_of(weights, rows.T, zeros, self.plan.interpreted, turn)
            added.append(self.total(totals, products, scale))
            zeros = zeros_in_place_of(products, ACC, self.plan.interpreted)
        return tuple(added)

    def total(self, totals, products, scale):
        """Rounded in the same way with any number of rows."""
        if scale is None:
            return rounded_sum(totals, products, ACC, self.plan.interpreted)
        scales = lax.broadcast_in_dim(scale, products.shape, [1])
        return scaled_sum(totals, products, scales, ACC, self.plan.interpreted)

    def write(self, warpgroup, sums) -> None:
        for unit, totals in enumerate(sums):
            if not self.plan.blocks:
                scales = load(self.row_scales.at[self.rows], PER_ROW)
                totals = totals * lax.broadcast_in_dim(scales, totals.shape, [1])
            self.write_unit(self.first_output + self.first_of(warpgroup, unit), totals)
