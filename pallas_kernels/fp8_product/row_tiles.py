"""How the rows of a call are cut into tiles, of which each thread block of a product takes one."""

import dataclasses

EIGHT = 8
"""Rows of a tile are a multiple of this."""
MOST_ROWS = 128
"""The most rows of a tile. Their sums take half of the registers that a thread may have."""
FEW_ROWS = 64
"""Up to this many rows there is room for two thread blocks on a multiprocessor."""
SHORTEST_COPY = 32
"""Scales of rows are copied in multiples of this many, because a bulk copy must write to an address
that is a multiple of 128 bytes."""


@dataclasses.dataclass(frozen=True)
class RowTiles:
    """The tiles of a number of rows. They do not depend on the matrix, so rows can be rounded, and
    their scales written tile by tile, before it is known which matrix they are multiplied by."""

    tokens: int
    """Rows of the call, without padding."""

    @property
    def count(self) -> int:
        return max(1, -(-self.tokens // MOST_ROWS))

    @property
    def rows(self) -> int:
        """Rows of each tile: the smallest multiple of eight with which all rows fit."""
        return -(-self.tokens // (self.count * EIGHT)) * EIGHT

    @property
    def padded(self) -> int:
        return self.count * self.rows

    @property
    def scales_at_once(self) -> int:
        """Scales of a tile's rows for one piece of their inputs, with padding."""
        return -(-self.rows // SHORTEST_COPY) * SHORTEST_COPY


class TilesOfRoundedRows(RowTiles):
    """The tiles of rows in 8 bits. If there are more than FEW_ROWS, each tile has MOST_ROWS, of
    which two warpgroups multiply 64 each."""

    @property
    def rows(self) -> int:
        return MOST_ROWS if self.tokens > FEW_ROWS else super().rows
