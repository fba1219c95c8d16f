"""How the rows of a call are cut into tiles, of which each thread block of a product takes one."""

import dataclasses

EIGHT = 8
"""Rows of a tile are a multiple of this."""
MOST_ROWS = 128
"""Rows of a tile, whose sums take half of the registers that a thread may have."""
SHORTEST_COPY = 32
"""Scales of rows are copied in multiples of these: what bulk copies write begins at multiples of
128 bytes."""


@dataclasses.dataclass(frozen=True)
class RowTiles:
    """The tiles of a number of rows. They do not depend on the matrix, so rows are rounded, and
    their scales written tile by tile, before it is known what they are multiplied by."""

    tokens: int
    """Rows of the call, without padding."""

    @property
    def count(self) -> int:
        return max(1, -(-self.tokens // MOST_ROWS))

    @property
    def rows(self) -> int:
        """Rows of a tile, all tiles as even as eights can be."""
        return -(-self.tokens // (self.count * EIGHT)) * EIGHT

    @property
    def padded(self) -> int:
        return self.count * self.rows

    @property
    def scales_at_once(self) -> int:
        """Scales of a tile's rows for one piece of their inputs, with padding."""
        return -(-self.rows // SHORTEST_COPY) * SHORTEST_COPY
