"""The static sizes that programs are compiled for."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Every size a step can have; true lengths are data and not among them."""

    row_buckets: tuple[int, ...]
    """Rows of a decode step, rising."""
    prefill_shapes: tuple[tuple[int, int], ...]
    """(rows, width) of a prefill step, by rising number of tokens."""

    @property
    def largest(self) -> "Shapes":
        """Only the largest of each."""
        return Shapes(self.row_buckets[-1:], self.prefill_shapes[-1:])

    def rows_for(self, count: int) -> int:
        """The smallest bucket that holds so many rows."""
        return next(rows for rows in self.row_buckets if rows >= count)

    def prefill_for(self, waiting: list[int]) -> tuple[int, int]:
        """The smallest shape that takes a chunk of every prompt with so many tokens left."""
        most_rows, widest = self.prefill_shapes[-1]
        rows, width = min(len(waiting), most_rows), min(max(waiting), widest)
        return next(s for s in self.prefill_shapes if s[0] >= rows and s[1] >= width)


def shapes_for(max_batch: int, prefill_chunk: int, exact: bool) -> Shapes:
    """Powers of two up to `max_batch`; with `exact` one shape per phase."""
    if exact:
        return Shapes((max_batch,), ((1, prefill_chunk),))
    powers = [2**i for i in range((max_batch - 1).bit_length())]
    batch = min(max_batch, 4)
    narrow = min(prefill_chunk, 64)
    prefill = {(1, narrow), (1, prefill_chunk), (batch, narrow), (batch, prefill_chunk)}
    by_tokens = sorted(prefill, key=lambda shape: (shape[0] * shape[1], shape[1]))
    return Shapes((*powers, max_batch), tuple(by_tokens))
