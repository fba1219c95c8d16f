"""Small arrays that come and go do not move the temporary memory of programs."""

import dataclasses
import random
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_pair import golden_engine

from jaxspec.engine.setup.small_pieces import (
    FREE_PIECES,
    between_free_pieces,
    spacers_on,
)

LARGE = 64 << 20
UNIT = 256


@dataclasses.dataclass(eq=False)
class Piece:
    """Memory that is in use as long as something refers to this."""

    begin: int
    size: int


class BestFit:
    """Gives out memory as XLA's allocator does: the beginning of the smallest free piece, the first
    of several; free neighbours become one piece."""

    def __init__(self, total: int = 1 << 30):
        self.free = {0: total}
        """Sizes of the free pieces, by where they begin."""

    def take(self, size: int) -> Piece:
        size = -(-size // UNIT) * UNIT
        whole, begin = min((free, at) for at, free in self.free.items() if free >= size)
        del self.free[begin]
        if whole >= 2 * size or whole - size >= LARGE:  # otherwise the rest is wasted
            self.free[begin + size] = whole - size
            whole = size
        piece = Piece(begin, whole)
        weakref.finalize(piece, self._give_back, begin, whole)
        return piece

    def _give_back(self, begin: int, size: int) -> None:
        if begin + size in self.free:
            size += self.free.pop(begin + size)
        before = [at for at, free in self.free.items() if at + free == begin]
        for at in before:
            begin, size = at, size + self.free.pop(at)
        self.free[begin] = size


def places_of_large_ones(memory: BestFit, steps: int = 400) -> set[int]:
    """Where a program's temporary memory begins in each step, while arrays of up to 200 kB and as
    many as an engine has come and go."""
    choose, places, small = random.Random(0), set(), []
    for _ in range(steps):
        small += [memory.take(choose.choice((128, 600, 2500, 9000))) for _ in range(4)]
        if choose.random() < 0.1:
            small.append(memory.take(choose.randrange(200_000)))
        while len(small) > choose.randrange(12, 48):
            small.pop(choose.randrange(len(small)))
        places.add(memory.take(LARGE).begin)
    return places


def test_temporary_memory_stays_where_it_is():
    memory = BestFit()
    kept = between_free_pieces(memory.take)
    assert len(places_of_large_ones(memory)) == 1
    assert sum(piece.size for piece in kept) < 7e6


def test_without_small_pieces_it_moves():
    assert len(places_of_large_ones(BestFit())) > 10


def test_between_two_kept_ones_one_is_free():
    memory = BestFit()
    kept = between_free_pieces(memory.take)
    sizes = sorted(memory.free.values())[:-1]
    assert sizes == sorted(size for size, count in FREE_PIECES.items() for _ in range(count))
    del kept
    assert len(memory.free) == 1, "all of it comes back"


def test_a_cpu_needs_none():
    assert spacers_on(1) == []
    assert golden_engine().loop.device.spacers == []


@pytest.mark.gpu
def test_on_a_gpu():
    kept = spacers_on(1)
    begins = lambda array: array.unsafe_buffer_pointer()
    choose, places, small = random.Random(0), set(), []
    for _ in range(60):
        sizes = [choose.choice((128, 600, 2500, 9000)) for _ in range(4)]
        small += [jax.block_until_ready(jax.device_put(np.zeros(size, np.uint8))) for size in sizes]
        while len(small) > choose.randrange(12, 48):
            small.pop(choose.randrange(len(small)))
        places.add(begins(jax.block_until_ready(jnp.zeros(LARGE, jnp.uint8))))
    assert len(places) == 1
    gaps = np.diff(sorted(begins(array) for array in kept if array.size == UNIT))
    assert np.median(gaps) == 2 * UNIT
