"""The plan of a product with inputs in 8 bits, which are read and multiplied twice as fast."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_kernels.fp8_product.chunk import UNIT
from pallas_kernels.fp8_product.plan import FEW_ROWS, MULTIPROCESSORS, TILE, Plan, Split
from pallas_kernels.fp8_product.quantise import E4M3
from pallas_kernels.fp8_product.rounded import Rounding, pieces_of
from pallas_kernels.jax_internals import plgpu

MIDDLE_TILE, WIDE_TILE = 3 * UNIT, 4 * UNIT
"""Outputs of a thread block with many rows, which are then read less often. The middle one has
three warpgroups. The wide one has two, whose sums take half of the registers that a thread may
have."""
CACHE_PER_MEMORY = 3
"""How many bytes the L2 cache delivers while memory delivers one: an estimate."""


@dataclasses.dataclass(frozen=True)
class PlanOf8By8(Plan):
    """A call whose rows are rounded to 8 bits."""

    @property
    def splits(self) -> list[Split]:
        tiles = (TILE, WIDE_TILE, MIDDLE_TILE) if self.rows > FEW_ROWS else (TILE,)
        whole = [tile for tile in tiles if self.outputs % tile == 0]
        return [split for tile in whole for split in self.splits_of_tile(tile)]

    def time(self, split: Split) -> float:
        """With many rows, the bytes that the L2 cache delivers to a multiprocessor, because with
        tiles of any size here they take longer than the arithmetic. They are the weights and rows
        of all steps, or the matrix from memory if that takes longer, and the result, whose parts
        are written and read in float32."""
        rows = self.rows
        if rows <= FEW_ROWS:
            return super().time(split)
        inputs = self.inputs / split.parts
        from_cache = self.rounds_of(split) * inputs * (split.tile + rows)
        from_memory = CACHE_PER_MEMORY * self.inputs * self.outputs / MULTIPROCESSORS
        per_number = 2 if split.parts == 1 else 2 * 4 * split.parts
        results = per_number * self.row_tiles * rows * self.outputs / MULTIPROCESSORS
        return max(from_cache, from_memory) + results

    @property
    def warpgroups(self) -> int:
        return 3 if self.tile == MIDDLE_TILE else 2

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

    @property
    def lag(self) -> int:
        """One step if warpgroups take turns: the first one fills a stage while its own products
        wait behind those of the others, which by then have finished the step before."""
        return min(1 if self.takes_turns else 2, self.stages - 1)

    def loaded(self) -> dict[str, Any]:
        operands = super().loaded()
        if self.blocks:
            scales = (self.stages, self.scales_at_once)
            operands["row_scales"] = plgpu.SMEM(scales, jnp.float32)
        return operands
