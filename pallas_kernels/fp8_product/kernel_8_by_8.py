"""The body of the kernel for few rows in 8 bits. Steps and pipeline are those of `kernel.py`.

The matrix instruction multiplies e4m3 by e4m3 from shared memory and keeps only about 14 bits of
its sums, so it adds up only the products of one step. These are then multiplied by the scales of
the row's piece and of the weights' block, and added to sums in float32. While the products run, the
first warpgroup starts the copies of a later step, and both load their scales.

As with inputs in 16 bits, the weights are the left side of the instruction, whose right side may
have any multiple of eight rows, so few rows need little arithmetic.
"""

import dataclasses
from typing import Any

from jax import lax

from pallas_kernels.fp8_product.chunk import UNIT, no_totals
from pallas_kernels.fp8_product.in_flight import begin_product, wait_and_add
from pallas_kernels.fp8_product.kernel import ThreadBlock
from pallas_kernels.fp8_product.plan_8_by_8 import PlanOf8By8
from pallas_kernels.fp8_product.widen import ACC
from pallas_kernels.jax_internals import pl, plgpu
from pallas_kernels.tiles import load

PER_ROW = ACC.reduce(0)


def run(plan: PlanOf8By8, x, weight, scales, row_scales, out, /, **scratch) -> None:
    block = ThreadBlockOf8By8(plan, x, weight, scales, out, scratch, row_scales)
    block.multiply(lax.axis_index("warpgroup"))


@dataclasses.dataclass(frozen=True)
class ThreadBlockOf8By8(ThreadBlock):
    plan: PlanOf8By8
    row_scales: Any
    """[row tiles, inputs / BLOCK or 1, scales at once]"""

    def operands(self, step) -> dict[str, Any]:
        operands = super().operands(step)
        if self.plan.blocks:
            row_tile = lax.axis_index("row_tile")
            operands["row_scales"] = self.row_scales.at[row_tile, self.block(step)]
        return operands

    def nothing(self):
        return no_totals(self.plan.rows)

    def add_step(self, step, warpgroup, sums, scale, request):
        stage = lax.rem(step, self.plan.stages)
        plgpu.barrier_wait(self.scratch["loaded"].at[stage])
        weights = self.scratch["weights"].at[stage, pl.ds(self.first_of(warpgroup), UNIT)]
        rows = self.scratch["rows"].at[stage]
        products = begin_product(weights, rows, self.plan.interpreted)
        request()
        scales = () if scale is None else (self.scales_of_rows(stage) * scale,)
        return wait_and_add(sums, products, scales, 1, self.plan.interpreted)

    def scales_of_rows(self, stage):
        scales = self.scratch["row_scales"].at[stage, pl.ds(0, self.plan.rows)]
        return load(scales, PER_ROW)

    def write(self, warpgroup, sums) -> None:
        if not self.plan.blocks:
            of_tile = self.row_scales.at[lax.axis_index("row_tile"), 0]
            scales = load(of_tile.at[pl.ds(0, self.plan.rows)], PER_ROW)
            sums = sums * lax.broadcast_in_dim(scales, sums.shape, [1])
        self.write_unit(self.first_output + self.first_of(warpgroup), sums)
