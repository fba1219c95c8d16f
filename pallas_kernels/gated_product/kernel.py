"""The body of the kernel for many rows: a product in 8 bits, whose tiles are gated and rounded.

It differs from `kernel_8_by_8_many_rows.py` in what a tile is, and in what becomes of its sums. The
first half of a tile's outputs are gates, the other half the ups that belong to them, so a thread
has both numbers, and a warpgroup all that share a scale.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.fp8_product import kernel_8_by_8_many_rows
from pallas_kernels.fp8_product.kernel_8_by_8_many_rows import Tile, own_rows
from pallas_kernels.fp8_product.plan_of import ACTIVATIONS
from pallas_kernels.fp8_product.quantise import BLOCK, rounded, scales_of_pieces
from pallas_kernels.gated_product.plan import PlanOfGates
from pallas_kernels.jax_internals import pl, plgpu, store
from pallas_kernels.silu_gate.mosaic import silu


def run(
    plan: PlanOfGates, x, weight, scales, row_scales, numbers, out_scales, /, **scratch
) -> None:
    ThreadBlock(plan, x, weight, scales, row_scales, numbers, scratch, out_scales).work()


@dataclasses.dataclass(frozen=True)
class ThreadBlock(kernel_8_by_8_many_rows.ThreadBlock):
    plan: PlanOfGates
    out_scales: Any
    """[row tiles, inner / BLOCK, scales at once]; `out` is [rows, inner] in e4m3"""

    def output(self, tile: Tile, number: int):
        """Gates come first, ups are an inner size further on."""
        of_up = number >= BLOCK
        return tile.outputs + (self.plan.outputs // 2 + number - BLOCK if of_up else number)

    def write(self, warpgroup, tile: Tile, sums) -> None:
        gated = gated_in_16_bits(*sums).astype(jnp.float32)
        of_rows = scales_of_pieces(abs(gated).max(axis=1))
        in_8_bits = rounded(gated / lax.broadcast_in_dim(of_rows, gated.shape, [0]))
        self.wait_until_copied()
        copied = self.scratch["results"].at[warpgroup]
        store(copied, in_8_bits)
        plgpu.commit_smem()
        columns = pl.ds(pl.multiple_of(tile.outputs, BLOCK), BLOCK)
        plgpu.copy_smem_to_gmem(copied, self.out.at[self.rows_of(warpgroup, tile), columns])
        piece = lax.div(tile.outputs, BLOCK)
        store(self.out_scales.at[tile.row_tile, piece, own_rows(warpgroup)], of_rows)


def gated_in_16_bits(gate, up):
    """Each sum is rounded to 16 bits, and so is the gated number, as if all were written."""
    gate, up = (totals.astype(ACTIVATIONS).astype(jnp.float32) for totals in (gate, up))
    return silu(gate, up)
