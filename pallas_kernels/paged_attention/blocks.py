"""How paged attention is cut into tiles: the sizes, and what follows from them."""

import dataclasses

TILE_ROWS = 64
"""Rows of one matrix instruction, and so of one warpgroup."""


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """The free choices of the kernel. All of them are static, none may depend on a length."""

    kv_tile: int = 64
    """Positions of the context that one pass of the loop handles."""
    stages: int = 3
    """Tiles of keys and values in flight per thread block."""
    splits: int = 1
    """Thread blocks (one cluster) that share one slot's context; tile t belongs to t % splits."""
    warpgroups: int = 1
    """Row tiles that share the loaded keys and values."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """The static shape of one call."""

    slots: int
    kv_heads: int
    width: int
    group: int
    head_dim: int
    page_size: int
    max_pages: int

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
    most = TILE_ROWS // shape.group
    row_tiles = -(-shape.width // most)
    copy_rows = min(shape.page_size, sizes.kv_tile)
    span = -(-shape.width // row_tiles)
    return Tiling(
        span=span,
        row_tiles=row_tiles,
        row_blocks=-(-row_tiles // sizes.warpgroups),
        copy_rows=copy_rows,
        copies=sizes.kv_tile // copy_rows,
        even=span * row_tiles == shape.width,
    )


MULTIPROCESSORS = 132


def choose_sizes(shape: Shape) -> BlockSizes:
    if shape.width * shape.group > TILE_ROWS:
        return BlockSizes(stages=3, warpgroups=2)
    blocks = shape.slots * shape.kv_heads
    splits = 1
    while splits < 8 and blocks * splits < MULTIPROCESSORS and aligned(shape, 2 * splits):
        splits *= 2
    return BlockSizes(stages=3, splits=splits)


def aligned(shape: Shape, splits: int) -> bool:
    """Whether one token's piece of the output starts at a multiple of 128 bytes in the tile."""
    return shape.width == 1 or shape.group * (shape.head_dim // splits) * 2 % 128 == 0
