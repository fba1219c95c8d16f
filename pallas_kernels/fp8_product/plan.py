"""How a product with an 8-bit matrix is split over thread blocks."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_kernels.fp8_product.chunk import UNIT
from pallas_kernels.fp8_product.quantise import BLOCK, E4M3
from pallas_kernels.jax_internals import plgpu
from pallas_kernels.tiles import SHARED_BYTES, swizzled

WARPGROUPS = 2
"""Of a thread block; each multiplies its half of the tile's outputs with all of its rows."""
TILE = WARPGROUPS * UNIT
"""Outputs of a thread block: those of a scale's block."""
EIGHT = 8
"""Rows of a thread block are a multiple of this."""
MOST_ROWS = 128
"""Rows of a thread block, whose sums take half of the registers that a thread may have."""
FEW_ROWS = 64
"""Up to so many rows there is room for two thread blocks on a multiprocessor."""
MULTIPROCESSORS = 132
"""Of an H100."""
PARTS = (1, 2, 4)
WORTH_PARTS = 0.9
"""More parts are taken if they need less than this share of the time, because they are written in
float32 and read again."""
SMALL_BYTES = 2 * 1024
"""Shared memory for barriers and alignment."""
MOST_STAGES = 8


class Split(NamedTuple):
    """How the matrix is split over thread blocks."""

    tile: int
    """Outputs of a thread block."""
    parts: int
    """Parts of the inputs."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about one call."""

    tokens: int
    """Rows of the call, without padding."""
    inputs: int
    outputs: int
    blocks: bool
    """Whether scales belong to blocks of the matrix; if not, to its outputs."""
    dtype: Any
    """Of the rows."""
    interpreted: bool

    @property
    def row_tiles(self) -> int:
        return -(-self.tokens // MOST_ROWS)

    @property
    def rows(self) -> int:
        """Rows of a thread block, all as even as eights can be."""
        return -(-self.tokens // (self.row_tiles * EIGHT)) * EIGHT

    @property
    def padded(self) -> int:
        return self.row_tiles * self.rows

    @property
    def tile(self) -> int:
        return self.split.tile

    @property
    def tiles(self) -> int:
        return self.outputs // self.tile

    @property
    def parts(self) -> int:
        return self.split.parts

    @property
    def split(self) -> Split:
        """The one with which the thread blocks fill the GPU best."""
        first, *others = self.splits
        best = first
        for split in others:
            if self.time(split) < WORTH_PARTS * self.time(best):
                best = split
        return best

    @property
    def splits(self) -> list[Split]:
        """Those that are tried, of which later ones have to be worth it."""
        return self.splits_of_tile(TILE)

    def splits_of_tile(self, tile: int) -> list[Split]:
        return [Split(tile, parts) for parts in PARTS if self.inputs % (parts * BLOCK) == 0]

    def time(self, split: Split) -> float:
        """The time of a product, in arbitrary units. Few rows take as long as the weights are read,
        by as many multiprocessors as there are thread blocks; more rows take a round of arithmetic
        for all thread blocks that run at once."""
        if self.rows <= FEW_ROWS:
            return 1 / min(self.blocks_of(split), MULTIPROCESSORS)
        return self.rounds_of(split) / split.parts

    def blocks_of(self, split: Split) -> int:
        return self.outputs // split.tile * self.row_tiles * split.parts

    def rounds_of(self, split: Split) -> int:
        """How many thread blocks a multiprocessor runs, one after the other."""
        return -(-self.blocks_of(split) // MULTIPROCESSORS)

    @property
    def steps(self) -> int:
        """Blocks of inputs that a thread block multiplies, one per pipeline stage."""
        return self.inputs // (self.parts * BLOCK)

    @property
    def stages(self) -> int:
        """As many as fit into the shared memory of this thread block."""
        blocks_at_once = 2 if self.rows <= FEW_ROWS else 1
        per_block = SHARED_BYTES // blocks_at_once - SMALL_BYTES
        return min(per_block // self.stage_bytes, MOST_STAGES)

    @property
    def stage_bytes(self) -> int:
        return BLOCK * (self.tile + self.rows * jnp.dtype(self.dtype_of_rows).itemsize)

    @property
    def dtype_of_rows(self) -> Any:
        """As they are multiplied."""
        return self.dtype

    def loaded(self) -> dict[str, Any]:
        """The shared memory into which a step's operands are copied."""
        return {
            "weights": swizzled((self.stages, self.tile, BLOCK), E4M3),
            "rows": swizzled((self.stages, self.rows, BLOCK), self.dtype_of_rows),
        }

    def scratch(self) -> dict[str, Any]:
        barrier = lambda arrivals: plgpu.Barrier(num_arrivals=arrivals, num_barriers=self.stages)
        operands = self.loaded()
        return operands | {"loaded": barrier(len(operands)), "used": barrier(WARPGROUPS)}
