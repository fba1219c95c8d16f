"""How paged attention is cut into tiles: the free choices, and what follows from them."""

import dataclasses

import jax

TILE_ROWS = 64
"""Rows of one matrix instruction, and so of one warpgroup."""

MOST_SPLITS = 8
"""Blocks in a cluster that every Hopper device can launch."""


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """The free choices of the kernel. All of them are static, none may depend on a length."""

    kv_tile: int = 64
    """Positions of the context that one pass of the loop handles."""
    stages: int = 2
    """Tiles of keys and values in flight per thread block."""
    splits: int = 1
    """Thread blocks (one cluster) that share one slot's context; tile t belongs to t % splits."""
    warpgroups: int = 1
    """Row tiles that share the loaded keys and values."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """The static shape of one call."""

    batch: int
    kv_heads: int
    width: int
    group: int
    head_dim: int
    page_size: int
    max_pages: int

    @property
    def blocks(self) -> int:
        return self.batch * self.kv_heads

    @property
    def capacity(self) -> int:
        return self.page_size * self.max_pages


@dataclasses.dataclass(frozen=True)
class Tiling:
    """What follows from a shape and its block sizes."""

    span: int
    """Query rows (tokens) of one row tile; it holds `span * group` rows of the matrix."""
    row_tiles: int
    row_blocks: int
    copy_rows: int
    """Positions that one bulk copy moves."""
    copies: int
    """Bulk copies that fill one tile."""
    even: bool
    """Whether the row tiles fill the width without overlapping."""


def tile(shape: Shape, sizes: BlockSizes) -> Tiling:
    row_tiles = -(-shape.width // (TILE_ROWS // shape.group))
    span = -(-shape.width // row_tiles)
    copy_rows = min(shape.page_size, sizes.kv_tile)
    return Tiling(
        span=span,
        row_tiles=row_tiles,
        row_blocks=-(-row_tiles // sizes.warpgroups),
        copy_rows=copy_rows,
        copies=sizes.kv_tile // copy_rows,
        even=span * row_tiles == shape.width,
    )


MOST_IN_LARGE_CLUSTERS = 64
"""Thread blocks in clusters of more than two. A cluster's have to be neighbours, and with many on
the chip the last clusters would wait for the first."""

MULTIPROCESSORS = {"NVIDIA H100 80GB HBM3": 132, "NVIDIA H200": 132}
"""Measured on the first; scripts/bench_kernels.py --sweep prints what the choice rests on."""


def choose_sizes(shape: Shape, device_kind: str | None = None) -> BlockSizes:
    """As many splits as find room at once."""
    if shape.width * shape.group > TILE_ROWS:
        return BlockSizes(warpgroups=2)
    multiprocessors = MULTIPROCESSORS.get(device_kind or default_device_kind(), 132)

    def fits(splits: int) -> bool:
        room = multiprocessors if splits == 2 else MOST_IN_LARGE_CLUSTERS
        return splits * shape.blocks <= room and output_aligned(shape, splits)

    splits = 1
    while 2 * splits <= MOST_SPLITS and fits(2 * splits):
        splits *= 2
    return BlockSizes(splits=splits)


def default_device_kind() -> str:
    return jax.devices()[0].device_kind


def output_aligned(shape: Shape, splits: int) -> bool:
    """Whether one token's piece of the output starts at a multiple of 128 bytes in the tile."""
    return shape.width == 1 or shape.group * (shape.head_dim // splits) * 2 % 128 == 0
