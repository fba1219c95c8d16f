"""Keeps small arrays away from where a GPU program's temporary memory begins.

XLA runs a program as a CUDA graph, which contains the addresses of its arrays. If an array lies
elsewhere than in the last run, the graph is changed first, on the host. For the temporary memory,
which most kernels use, that takes several milliseconds, in which the GPU may have nothing to do.

Memory is given out by best fit: an array gets the beginning of the smallest free piece that holds
it. So the temporary memory of a program is at the same address in every run, unless a small array
was put in front of it because no smaller piece was free:

    |weights, pages|        free         |      the temporary memory begins here
    |weights, pages|s|      free         |      and here while the small array s lives
    |weights, pages|k k k k k|   free    |      s fits between two arrays k that are kept
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

FREE_PIECES = {
    256: 512,
    **dict.fromkeys((512, 1 << 10, 2 << 10, 4 << 10), 64),
    **dict.fromkeys((8 << 10, 16 << 10, 32 << 10, 64 << 10), 16),
    **dict.fromkeys((128 << 10, 256 << 10), 8),
}
"""How many free pieces are made of each number of bytes: more than an engine has small arrays at a
time. These are inputs, results that the host has not read, and the uploads that `Device.integers`
keeps. All pieces and what is kept between them take 12 MB."""


def spacers_on(devices: int) -> list[jax.Array]:
    """Makes small free pieces in the memory of each of the first GPUs, and returns the arrays
    between them. The pieces last as long as these. A CPU gives out memory in another way."""
    if jax.default_backend() != "gpu":
        return []
    return [
        array
        for device in jax.local_devices()[:devices]
        for array in between_free_pieces(partial(_bytes_on, device))
    ]


def between_free_pieces[Piece](take: Callable[[int], Piece]) -> list[Piece]:
    """Takes pieces of each size, one behind the other, and lets go of every second one. `take`
    takes a piece of so many bytes, until nothing refers to what it returns."""
    kept = []
    for size, count in FREE_PIECES.items():
        row = [take(size) for _ in range(2 * count + 1)]
        kept += row[::2]
        del row
    return kept


def _bytes_on(device: Any, size: int) -> jax.Array:
    return jax.device_put(np.zeros(size, np.uint8), device)
