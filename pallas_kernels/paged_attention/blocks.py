"""How paged attention is cut into tiles: the block sizes, and what follows from them."""

import dataclasses

TILE_ROWS = 64
"""Rows of a matrix instruction (wgmma), and so of the tile of one warpgroup."""

MOST_SPLITS = 8
"""Thread blocks per cluster; every Hopper GPU can launch clusters of up to 8."""


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Tuning parameters of the kernel. All are static: none may depend on a request's length."""

    kv_tile: int = 64
    """Positions per tile of keys and values; one iteration of the loop handles one tile."""
    stages: int = 2
    """Pipeline stages: tiles of keys and values that a thread block holds or prefetches."""
    splits: int = 1
    """Thread blocks (one cluster) that share a request's context; split t % splits takes tile t."""
    warpgroups: int = 1
    """Warpgroups of a thread block. Each has its own row tile; all share the keys and values."""


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
        """Thread blocks per block of rows if the context is not split."""
        return self.batch * self.kv_heads

    @property
    def row_tiles(self) -> int:
        """Row tiles of a request and key-value head."""
        tokens = max(1, TILE_ROWS // self.group)  # larger groups are refused when a plan is made
        return -(-self.width // tokens)

    @property
    def span(self) -> int:
        """Tokens of one row tile. Each has a row per head of the group: `span * group` rows."""
        return -(-self.width // self.row_tiles)

    @property
    def even(self) -> bool:
        """Whether the width is a multiple of `span`. If not, the last row tile overlaps another."""
        return self.span * self.row_tiles == self.width

    @property
    def staged(self) -> bool:
        """Whether queries are loaded to unswizzled shared memory first, and swizzled from there.

        A bulk copy can write only whole groups of 8 rows of swizzled memory.
        """
        return self.span * self.group % 8 != 0 or not self.even


@dataclasses.dataclass(frozen=True)
class Tiling:
    """What follows from a shape and its block sizes."""

    row_blocks: int
    """Thread blocks (or clusters) for the row tiles of a request and key-value head."""
    copy_rows: int
    """Positions that one bulk copy moves."""
    copies: int
    """Bulk copies that fill one tile."""


def tile(shape: Shape, sizes: BlockSizes) -> Tiling:
    copy_rows = min(shape.page_size, sizes.kv_tile)
    return Tiling(
        row_blocks=row_blocks(shape, sizes.warpgroups),
        copy_rows=copy_rows,
        copies=sizes.kv_tile // copy_rows,
    )


def row_blocks(shape: Shape, warpgroups: int) -> int:
    return -(-shape.row_tiles // warpgroups)


MOST_IN_LARGE_CLUSTERS = 64
"""The most thread blocks of a call whose clusters have more than two. The thread blocks of a
cluster must be neighbours on the chip; if a call had more of them, its last clusters would wait for
the first to end."""

MULTIPROCESSORS = 132
"""Multiprocessors of an H100 or H200. `scripts/bench_kernels.py --sweep` prints the times behind
`choose_sizes`."""


WIDE_HEAD = 256
"""Heads this wide have tiles of fewer positions: their accumulator takes half of a thread's
registers, and two tiles of 64 positions leave no room for a mailbox in shared memory. Nor do the
queries of a second warpgroup."""
SHORT_TILES = {"kv_tile": 32, "stages": 3}
FEWER_SHORT_TILES = {"kv_tile": 32, "stages": 2}
"""For calls with splits, if their queries need shared memory twice (`Shape.staged`)."""


def choose_sizes(shape: Shape) -> BlockSizes:
    """As many splits as can run at the same time. If there are several tiles of rows and no room to
    split their contexts, two tiles share a thread block of two warpgroups, and with it the keys and
    values that it loads."""
    alone = with_most_splits(shape, warpgroups=1)
    if alone.splits > 1 or shape.row_tiles == 1:
        return alone
    return with_most_splits(shape, warpgroups=2)


def with_most_splits(shape: Shape, warpgroups: int) -> BlockSizes:
    wide, clusters = shape.head_dim >= WIDE_HEAD, shape.blocks * row_blocks(shape, warpgroups)

    def fits(splits: int) -> bool:
        room = MULTIPROCESSORS if splits == 2 else MOST_IN_LARGE_CLUSTERS
        return splits * clusters <= room and output_aligned(shape, splits)

    splits, most = 1, 1 if wide and warpgroups > 1 else MOST_SPLITS
    while 2 * splits <= most and fits(2 * splits):
        splits *= 2
    short = FEWER_SHORT_TILES if splits > 1 and shape.staged else SHORT_TILES
    return BlockSizes(splits=splits, warpgroups=warpgroups, **(short if wide else {}))


def output_aligned(shape: Shape, splits: int) -> bool:
    """Whether each token's part of the output tile starts at a multiple of 128 bytes."""
    return shape.width == 1 or shape.group * (shape.head_dim // splits) * 2 % 128 == 0
