"""How a product with an 8-bit matrix is split over thread blocks."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_kernels.fp8_product.chunk import UNIT
from pallas_kernels.fp8_product.measured import MEASURED
from pallas_kernels.fp8_product.quantise import BLOCK, E4M3
from pallas_kernels.fp8_product.row_tiles import FEW_ROWS, RowTiles
from pallas_kernels.jax_internals import plgpu
from pallas_kernels.tiles import SHARED_BYTES, swizzled

TILE = 2 * UNIT
"""Outputs of a thread block: as many as a scale's block has."""
TILES_OF_MANY_ROWS = TILE, 3 * UNIT, 4 * UNIT
"""Outputs of a thread block with many rows: those of two, three or four warpgroups. With more
warpgroups the tensor core is idle less often, but some matrices fill the GPU with only one of these
tiles."""
MULTIPROCESSORS = 132
"""Of an H100."""
PARTS = (1, 2, 4)
WORTH_ANOTHER = 0.99
"""A later one of `Plan.splits` is chosen only if it takes less than this share of the time."""
SMALL_BYTES = 2 * 1024
"""Shared memory for barriers and alignment of a second thread block."""
MOST_STAGES = 8
BYTES_OF_NUMBER = 4
"""Bytes that are written and read again for each number of the result in 16 bits."""
CACHED = 0.7
"""The time for such a byte, in units of that for a byte of weights: it stays in the L2 cache.
Fitted to measured times."""


class Costs(NamedTuple):
    """What a thread block of many rows does beside multiplying, in units of the time that one
    output takes in one step. They were fitted to measured times."""

    step: float
    """For each step, however many outputs are multiplied."""
    number: float
    """For each number of the result, which is written and read again."""


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
    """Dtype of the rows."""
    interpreted: bool
    given: Split | None = None
    """A split to use instead of the one that the plan would choose."""

    @property
    def tiles_of_rows(self) -> RowTiles:
        return RowTiles(self.tokens)

    @property
    def row_tiles(self) -> int:
        return self.tiles_of_rows.count

    @property
    def rows(self) -> int:
        """Rows of a thread block."""
        return self.tiles_of_rows.rows

    @property
    def padded(self) -> int:
        return self.tiles_of_rows.padded

    @property
    def measured(self) -> Split | None:
        found = None if self.interpreted else MEASURED.get(self.shape)
        return found and Split(*found)

    @property
    def shape(self) -> tuple[int, int, int, str]:
        return self.tokens, self.outputs, self.inputs, jnp.dtype(self.dtype_of_rows).name

    @property
    def tile(self) -> int:
        return self.split.tile

    @property
    def tiles(self) -> int:
        return self.outputs // self.tile

    @property
    def grid(self) -> dict[str, int]:
        """Thread blocks along each axis. The last axis varies fastest, so that tiles of rows which
        share weights run together."""
        return {"part": self.parts, "tile": self.tiles, "row_tile": self.row_tiles}

    @property
    def warpgroups(self) -> int:
        """Warpgroups of a thread block. Each multiplies UNIT outputs of the tile with all of its
        rows."""
        return self.tile // UNIT

    @property
    def takes_turns(self) -> bool:
        """Whether the warpgroups multiply one after the other. With few rows a second thread block
        is on the multiprocessor, and products are short."""
        return self.rows > FEW_ROWS

    @property
    def parts(self) -> int:
        return self.split.parts

    @property
    def split(self) -> Split:
        """The given split, or else the one that was measured to be the fastest, or else the one
        with the shortest estimated time."""
        if known := self.given or self.measured:
            return known
        first, *others = self.splits
        best = first
        for split in others:
            if self.time(split) < WORTH_ANOTHER * self.time(best):
                best = split
        return best

    @property
    def splits(self) -> list[Split]:
        """The splits to choose from. A later one must be clearly faster (`WORTH_ANOTHER`)."""
        tiles = TILES_OF_MANY_ROWS if self.rows > FEW_ROWS else (TILE,)
        by_tile = [self.splits_of_tile(tile) for tile in tiles if self.outputs % tile == 0]
        return [split for of_parts in zip(*by_tile) for split in of_parts]

    def splits_of_tile(self, tile: int) -> list[Split]:
        return [Split(tile, parts) for parts in PARTS if self.inputs % (parts * BLOCK) == 0]

    def time(self, split: Split) -> float:
        """The estimated time of a product, in arbitrary units."""
        if self.rows <= FEW_ROWS:
            return self.time_to_read(split)
        steps = self.rounds_of(split) * self.inputs / (split.parts * BLOCK)
        return steps * (split.tile + self.costs.step) + self.costs.number * self.written(split)

    def time_to_read(self, split: Split) -> float:
        """The time for reading the weights of few rows, in units of the time that one thread block
        on each multiprocessor takes for those of all inputs. One is enough to keep the memory busy,
        and there is room for two."""
        rounds, left = divmod(self.blocks_of(split), 2 * MULTIPROCESSORS)
        at_the_end = max(1, left / MULTIPROCESSORS) if left else 0
        written = CACHED * BYTES_OF_NUMBER * self.written(split) / (split.tile * self.inputs)
        return (2 * rounds + at_the_end) / split.parts + written

    @property
    def costs(self) -> Costs:
        return Costs(step=64, number=0.035)

    def written(self, split: Split) -> float:
        """Numbers of the result for each multiprocessor. One of a part counts twice, because it is
        in float32."""
        numbers = self.padded * self.outputs / MULTIPROCESSORS
        return numbers if split.parts == 1 else 2 * split.parts * numbers

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
        """Pipeline stages: as many as fit into the shared memory of a thread block."""
        per_block = SHARED_BYTES
        if self.rows <= FEW_ROWS:
            per_block = SHARED_BYTES // 2 - SMALL_BYTES
        return min(per_block // self.stage_bytes, MOST_STAGES)

    @property
    def lag(self) -> int:
        """How many steps after its use a stage is filled again. By then the other warpgroups have
        usually finished with it, so the one that fills it need not wait for them."""
        return min(2, self.stages - 1)

    @property
    def stage_bytes(self) -> int:
        return BLOCK * (self.tile + self.rows * jnp.dtype(self.dtype_of_rows).itemsize)

    @property
    def dtype_of_rows(self) -> Any:
        """The dtype in which rows are multiplied."""
        return self.dtype

    def loaded(self) -> dict[str, Any]:
        """The shared memory into which a step's operands are copied."""
        return {
            "weights": swizzled((self.stages, self.tile, BLOCK), E4M3),
            "rows": swizzled((self.stages, self.rows, BLOCK), self.dtype_of_rows),
        }

    def scratch(self) -> dict[str, Any]:
        operands = self.loaded()
        loaded = plgpu.Barrier(num_arrivals=len(operands), num_barriers=self.stages)
        used = plgpu.Barrier(num_arrivals=self.warpgroups, num_barriers=self.stages)
        scratch = operands | {"loaded": loaded, "used": used}
        if self.takes_turns:
            scratch["turns"] = plgpu.Barrier(num_arrivals=1, num_barriers=self.warpgroups)
        return scratch
