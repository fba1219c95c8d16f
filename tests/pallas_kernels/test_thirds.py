"""Products with a matrix in float32 on the tensor core: its thirds, and which thread has what."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.gated_delta.thirds import PIECE, RIGHT, SINGLE, rounded_thirds

SHAPE = PIECE, 128
WARPS, LANES = 4, 32


def test_three_numbers_in_bfloat16_make_up_one_in_float32():
    draw = np.random.default_rng(0)
    numbers = draw.normal(size=1000) * 2.0 ** draw.integers(-20, 20, size=1000)
    numbers = jnp.asarray(numbers, jnp.float32)
    thirds = rounded_thirds(numbers)
    assert all((part.astype(jnp.bfloat16).astype(jnp.float32) == part).all() for part in thirds)
    total = sum(np.asarray(part, np.float64) for part in thirds)
    np.testing.assert_array_equal(total, np.asarray(numbers, np.float64))


def places_of_threads(layout) -> np.ndarray:
    """By warp, lane and register, in the order in which code sees them, the place of a number in a
    matrix of `SHAPE`, counted along its rows."""
    tiled = layout.to_mgpu()
    places = np.arange(np.prod(SHAPE)).reshape(SHAPE)
    for tile in tiled.tiling.tiles:
        outer = places.ndim - len(tile)
        sizes = [(size // part, part) for size, part in zip(places.shape[outer:], tile)]
        split = places.reshape(*places.shape[:outer], *[size for pair in sizes for size in pair])
        axes = [outer + 2 * i + j for j in (0, 1) for i in range(len(tile))]
        places = split.transpose(*range(outer), *axes)
    of_warps = [dim for dim in tiled.warp_dims if isinstance(dim, int)]
    assert all(getattr(dim, "times", 1) == 1 for dim in tiled.warp_dims)
    front = [places.ndim + dim for dim in (*of_warps, *tiled.lane_dims)]
    last = places.ndim + tiled.vector_dim
    between = [axis for axis in range(places.ndim) if axis not in (*front, last)]
    return places.transpose(*front, *between, last).reshape(WARPS, LANES, -1)


def test_single_numbers_are_those_of_the_right_side_in_order():
    np.testing.assert_array_equal(places_of_threads(SINGLE), places_of_threads(RIGHT))


def test_the_right_side_is_what_a_matrix_instruction_takes():
    """As the manual of PTX has it for mma.m16n8k16: of eight columns each thread has one, and of
    the 16 inputs two neighbours in the first half and two in the second."""
    lane, warp = np.arange(LANES), np.arange(WARPS)[:, None]
    places = places_of_threads(RIGHT)
    for tile in range(SHAPE[1] // 32):
        for register in range(4):
            row = 2 * (lane % 4) + register % 2 + 8 * (register // 2)
            column = lane // 4 + 8 * warp + 32 * tile
            np.testing.assert_array_equal(
                places[:, :, 4 * tile + register], row * SHAPE[1] + column
            )
