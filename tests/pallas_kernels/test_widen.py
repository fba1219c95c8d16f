"""The bytes that each thread widens are those of its registers of the matrix instruction.

The interpreter does not run these instructions, so their addresses are worked out here.
"""

import math

import numpy as np

from pallas_kernels.fp8_product import widen
from pallas_kernels.fp8_product.quantise import BLOCK

SHAPE = (widen.UNIT, BLOCK)


def tiled(array: np.ndarray, tiles) -> np.ndarray:
    """Each tile cuts the last axes into tiles, whose axes come last."""
    for tile in tiles:
        kept, cut = array.shape[: -len(tile)], array.shape[-len(tile) :]
        pairs = [size for whole, of in zip(cut, tile) for size in (whole // of, of)]
        array = array.reshape(*kept, *pairs)
        first = len(kept)
        outer = [first + 2 * i for i in range(len(tile))]
        order = [*range(first), *outer, *(axis + 1 for axis in outer)]
        array = array.transpose(order)
    return array


def places_by_layout() -> np.ndarray:
    """[threads, registers, 2]: the number of the weight, counted row by row."""
    layout = widen.ACC.to_mgpu()
    weights = tiled(np.arange(math.prod(SHAPE)).reshape(SHAPE), layout.tiling.tiles)
    axes = [weights.ndim + axis for axis in (*layout.warp_dims, *layout.lane_dims)]
    rest = [axis for axis in range(weights.ndim - 1) if axis not in axes]
    return weights.transpose(*axes, *rest, weights.ndim - 1).reshape(128, -1, 2)


def swizzled_memory() -> np.ndarray:
    """What a bulk copy with a swizzle of 128 bytes writes: pieces of 16 bytes change places within
    their row, by the row's number among eight."""
    rows = np.arange(math.prod(SHAPE)).reshape(*SHAPE)
    pieces = rows.reshape(widen.UNIT, BLOCK // widen.PIECE, widen.PIECE)
    row = np.arange(widen.UNIT)[:, None]
    piece = np.arange(BLOCK // widen.PIECE)[None]
    return pieces[row, piece ^ row % widen.ROWS].reshape(-1)


def test_every_thread_reads_its_own_pairs():
    memory, thread = swizzled_memory(), np.arange(128)
    first = sum(thread // divisor % size * stride for divisor, size, stride in widen.PLACES)
    addresses = [
        (first ^ piece) + offset
        for piece in range(0, BLOCK, widen.PIECE)
        for offset in widen.PAIRS_OF_PIECE
    ]
    found = np.stack([[memory[at], memory[at + 1]] for at in addresses])
    np.testing.assert_array_equal(found.transpose(2, 0, 1), places_by_layout())


def test_the_loads_of_a_warp_are_in_different_banks():
    """Each of the 32 banks has four bytes; two threads may read the same four."""
    thread = np.arange(32)
    first = sum(thread // divisor % size * stride for divisor, size, stride in widen.PLACES)
    for piece in range(0, BLOCK, widen.PIECE):
        words = np.unique((first ^ piece) // 4)
        assert len(np.unique(words % 32)) == len(words)
