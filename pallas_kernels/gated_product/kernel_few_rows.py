"""The body of the kernel for up to 64 rows. Steps and pipeline are those of `kernel_8_by_8.py`.

A thread block has 128 gates and their ups, and each of its two warpgroups 64 of both. The gated
numbers of a row, which share a scale, are then in both warpgroups and in many lanes. So they are
written to shared memory in 16 bits, and read and rounded row by row.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.fp8_product.in_flight import begin_product, wait_and_add
from pallas_kernels.fp8_product.kernel_8_by_8 import ThreadBlockOf8By8
from pallas_kernels.fp8_product.quantise import BLOCK
from pallas_kernels.fp8_product.rounding import PIECES, eight_in_8_bits
from pallas_kernels.fp8_product.row_tiles import EIGHT
from pallas_kernels.fp8_product.widen import UNIT
from pallas_kernels.gated_product.kernel import gated_in_16_bits
from pallas_kernels.gated_product.plan import PlanOfFewGates
from pallas_kernels.jax_internals import pl, plgpu, store
from pallas_kernels.tiles import load

KINDS = "gates", "ups"


def run(
    plan: PlanOfFewGates, x, weight, scales, row_scales, numbers, out_scales, /, **scratch
) -> None:
    block = ThreadBlock(plan, x, weight, scales, numbers, scratch, row_scales, out_scales)
    block.multiply(lax.axis_index("warpgroup"))


@dataclasses.dataclass(frozen=True)
class ThreadBlock(ThreadBlockOf8By8):
    plan: PlanOfFewGates
    out_scales: Any
    """[1, inner / BLOCK, scales at once]; `out` is [rows, inner] in e4m3"""

    @property
    def pieces(self) -> tuple:
        """Which pieces of BLOCK outputs of the matrix the gates and the ups are."""
        return self.piece, self.plan.outputs // (2 * BLOCK) + self.piece

    @property
    def piece(self):
        """Which piece of the result this thread block makes."""
        return lax.axis_index("tile")

    def operands(self, step) -> dict[str, Any]:
        operands, inputs = super().operands(step), pl.ds(self.block(step) * BLOCK, BLOCK)
        del operands["weights"]
        for kind, piece in zip(KINDS, self.pieces, strict=True):
            operands[kind] = self.weight.at[pl.ds(piece * BLOCK, BLOCK), inputs]
        return operands

    def nothing(self):
        return (super().nothing(),) * len(KINDS)

    def scale_of(self, step, warpgroup):
        del warpgroup
        return tuple(self.scales[piece, self.block(step)] for piece in self.pieces)

    def add_step(self, step, warpgroup, sums, scale, request):
        stage = lax.rem(step, self.plan.stages)
        plgpu.barrier_wait(self.scratch["loaded"].at[stage])
        rows = self.scratch["rows"].at[stage]
        weights = [self.scratch[kind].at[stage, self.own(warpgroup)] for kind in KINDS]
        begun = [begin_product(one, rows, self.plan.interpreted) for one in weights]
        request()
        of_rows = self.scales_of_rows(stage)
        gate, up = (
            wait_and_add(total, products, (of_rows * one,), 1, self.plan.interpreted, running)
            for total, products, one, running in zip(sums, begun, scale, (1, 0), strict=True)
        )
        return gate, up

    def own(self, warpgroup):
        """The gates, and the ups, of a warpgroup."""
        return pl.ds(self.first_of(warpgroup), UNIT)

    def write(self, warpgroup, sums) -> None:
        gated = plgpu.layout_cast(gated_in_16_bits(*sums), plgpu.Layout.WGMMA_TRANSPOSED)
        store(self.scratch["gated"].at[:, self.own(warpgroup)].T, gated)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.scratch["written"])
        plgpu.barrier_wait(self.scratch["written"])
        for number in range(self.plan.rows // EIGHT):
            turn = number % self.plan.warpgroups
            pl.when(warpgroup == turn)(lambda number=number: self.write_eight(number))

    def write_eight(self, number: int) -> None:
        """Rounds eight rows."""
        eight = pl.ds(number * EIGHT, EIGHT)
        wide = load(self.scratch["gated"].at[eight], PIECES).astype(jnp.float32)
        in_8_bits, of_rows = eight_in_8_bits(wide)
        store(self.out.at[eight, pl.ds(self.piece * BLOCK, BLOCK)], in_8_bits)
        store(self.out_scales.at[0, self.piece, eight], of_rows)
