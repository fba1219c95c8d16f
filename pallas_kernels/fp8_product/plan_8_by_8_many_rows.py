"""The plan of a product of many rows in 8 bits with a matrix in 8 bits."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from pallas_kernels.fp8_product.plan import MOST_STAGES, MULTIPROCESSORS, TILE, Costs, Split
from pallas_kernels.fp8_product.plan_8_by_8 import PlanOf8By8
from pallas_kernels.fp8_product.quantise import BLOCK
from pallas_kernels.fp8_product.widen import UNIT
from pallas_kernels.jax_internals import plgpu
from pallas_kernels.releases import MOVES_REGISTERS
from pallas_kernels.tiles import SHARED_BYTES, swizzled

MULTIPLIERS = 2
"""Warpgroups that multiply. One more loads."""
TILES = TILE, 3 * UNIT, 4 * UNIT
"""Outputs of a tile."""
LONGEST_UNIT = 3 * UNIT
"""The most outputs that a warpgroup multiplies at a time: products of more would not fit into its
registers beside the sums."""
BYTES_OF_ROWS_TOGETHER = 8 * 1024**2
"""Rows of about as many bytes are multiplied by all weights before the next ones. With the weights
that are multiplied meanwhile they stay in the L2 cache, of which each half of an H100 has 25 MB."""


@dataclasses.dataclass(frozen=True)
class PlanOfManyRows(PlanOf8By8):
    """A call with tiles of 128 rows, whose thread blocks take several tiles each."""

    @property
    def measured(self) -> Split | None:
        found = super().measured
        return found if found and found.tile in self.possible_tiles else None

    @property
    def possible_tiles(self) -> tuple[int, ...]:
        """Those whose sums and products fit into the registers that a thread has."""
        return TILES if MOVES_REGISTERS else TILES[:1]

    @property
    def splits(self) -> list[Split]:
        whole = [tile for tile in self.possible_tiles if self.outputs % tile == 0]
        return [split for tile in whole for split in self.splits_of_tile(tile)]

    @property
    def costs(self) -> Costs:
        return Costs(step=30, number=0.085)

    @property
    def all_tiles(self) -> int:
        return self.blocks_of(self.split)

    @property
    def thread_blocks(self) -> int:
        return min(self.all_tiles, MULTIPROCESSORS)

    @property
    def row_tiles_together(self) -> int:
        """Tiles of rows that are multiplied by all weights before the next ones."""
        return max(1, min(self.row_tiles, BYTES_OF_ROWS_TOGETHER // (self.rows * self.inputs)))

    @property
    def results_of_tile(self) -> int:
        """Columns of the result that a tile makes."""
        return self.tile

    @property
    def outputs_of_copy(self) -> int:
        """Outputs whose weights come by one copy, because they are neighbours."""
        return self.tile

    @property
    def firsts_of_copies(self) -> range:
        """The first output of a tile that each copy brings."""
        return range(0, self.tile, self.outputs_of_copy)

    @property
    def grid(self) -> dict[str, int]:
        return {"block": self.thread_blocks}

    @property
    def warpgroups(self) -> int:
        return MULTIPLIERS + 1

    @property
    def unit(self) -> int:
        """Outputs that a warpgroup multiplies at a time."""
        return self.tile if self.tile <= LONGEST_UNIT else self.tile // 2

    @property
    def units(self) -> int:
        return self.tile // self.unit

    @property
    def takes_turns(self) -> bool:
        """Whether one warpgroup's products run while the other adds up its own. Otherwise the order
        is left to the tensor core."""
        return self.units > 1

    @property
    def steps_at_once(self) -> int:
        """Steps whose products are in registers at the same time, if there is room for so many."""
        return 2 if MOVES_REGISTERS and self.tile == TILE and self.steps % 2 == 0 else 1

    @property
    def scaled_alike(self) -> range:
        """The first output of each group of a tile's outputs that lies in one block of scales,
        wherever the tile begins."""
        return range(0, self.tile, math.gcd(self.unit, BLOCK))

    @property
    def scales_of_unit(self) -> int:
        return len(self.scaled_alike) // self.units

    @property
    def writes_by_copies(self) -> bool:
        """Whether results go to shared memory, from where bulk copies take them while the next tile
        is multiplied. Parts in float32 would leave too little room for weights."""
        return self.parts == 1

    @property
    def results(self) -> Any:
        """The shared memory from which results are copied; None if they are not."""
        shape = MULTIPLIERS, self.units, UNIT, self.unit
        return swizzled(shape, self.dtype) if self.writes_by_copies else None

    @property
    def stages(self) -> int:
        made = self.results
        taken = 0 if made is None else math.prod(made.shape) * jnp.dtype(made.dtype).itemsize
        return min((SHARED_BYTES - taken) // self.stage_bytes, MOST_STAGES)

    def scratch(self) -> dict[str, Any]:
        operands, made = self.loaded(), self.results
        copies = len(operands) - 1 + len(self.firsts_of_copies)
        scratch = operands | {
            "loaded": plgpu.Barrier(num_arrivals=copies, num_barriers=self.stages),
            "used": plgpu.Barrier(num_arrivals=MULTIPLIERS, num_barriers=self.stages),
        }
        if self.takes_turns:
            scratch["turns"] = plgpu.Barrier(num_arrivals=1, num_barriers=MULTIPLIERS)
        return scratch if made is None else scratch | {"results": made}
