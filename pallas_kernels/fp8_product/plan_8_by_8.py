"""The plan of a product with inputs in 8 bits, which are read and multiplied twice as fast."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_kernels.fp8_product.plan import Plan
from pallas_kernels.fp8_product.quantise import E4M3
from pallas_kernels.fp8_product.rounded import Rounding, pieces_of
from pallas_kernels.fp8_product.row_tiles import TilesOfRoundedRows
from pallas_kernels.jax_internals import plgpu


@dataclasses.dataclass(frozen=True)
class PlanOf8By8(Plan):
    """A call whose rows are rounded to 8 bits."""

    @property
    def tiles_of_rows(self) -> TilesOfRoundedRows:
        return TilesOfRoundedRows(self.tokens)

    @property
    def stage_bytes(self) -> int:
        return super().stage_bytes + (4 * self.scales_at_once if self.blocks else 0)

    @property
    def dtype_of_rows(self) -> Any:
        return E4M3

    @property
    def scales_at_once(self) -> int:
        """Scales of a tile of rows for one piece of their inputs, with padding."""
        return self.tiles_of_rows.scales_at_once

    @property
    def rounding(self) -> Rounding:
        """Whether each piece of a row has a scale, or each row."""
        return "pieces" if self.blocks else "rows"

    @property
    def shape_of_scales(self) -> tuple[int, int, int]:
        """The shape of all rows' scales, tile by tile."""
        return self.row_tiles, pieces_of(self.inputs, self.rounding), self.scales_at_once

    def loaded(self) -> dict[str, Any]:
        operands = super().loaded()
        if self.blocks:
            scales = (self.stages, self.scales_at_once)
            operands["row_scales"] = plgpu.SMEM(scales, jnp.float32)
        return operands
