"""Products with 8-bit matrices: exact in their numbers, with every scale where it belongs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import NotForThisKernel, fp8_product
from pallas_kernels.fp8_product import BLOCK, E4M3, quantised_blocks, reference
from pallas_kernels.fp8_product.quantise import quantised_pieces, rounded


def matrix(outputs: int, inputs: int, channels: bool, seed: int = 0):
    """Numbers and scales, of which neighbouring ones differ by powers of two."""
    random = np.random.default_rng(seed)
    shape = (outputs, 1) if channels else (outputs // BLOCK, inputs // BLOCK)
    numbers = random.normal(size=(outputs, inputs), scale=100).clip(-448, 448).astype(E4M3)
    scales = 2.0 ** random.integers(-9, -3, shape) * random.uniform(1, 2, shape)
    return jnp.asarray(numbers), jnp.asarray(scales, jnp.float32)


def dequantised(numbers, scales) -> np.ndarray:
    wide = np.asarray(scales, np.float64)
    down, along = (size // of for size, of in zip(numbers.shape, scales.shape))
    return np.asarray(numbers, np.float64) * wide.repeat(down, 0).repeat(along, 1)


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize(("dtype", "off"), [("float32", 1e-6), ("bfloat16", 2**-8)])
@pytest.mark.parametrize("tokens", [(3,), (2, 4), (reference.TOKENS_AT_ONCE + 5,), (0,)])
def test_the_product_is_that_of_the_dequantised_matrix(tokens, dtype, off, channels):
    numbers, scales = matrix(384, 256, channels)
    x = jax.random.normal(jax.random.key(0), (*tokens, 256), dtype)
    found = fp8_product(x, numbers, scales)
    wanted = np.asarray(x, np.float64) @ dequantised(numbers, scales).T
    assert found.shape == (*tokens, 384) and found.dtype == dtype
    largest = abs(wanted).max(initial=1.0)
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, atol=off * largest)


def test_a_product_in_bfloat16_is_rounded_only_once():
    """The matrix is not rounded to bfloat16, where a number times its scale would need more bits:
    the result is the nearest bfloat16 of the exact one, up to rare ties."""
    numbers, scales = matrix(256, 256, channels=False)
    x = jax.random.normal(jax.random.key(0), (16, 256), jnp.bfloat16)
    found = np.asarray(fp8_product(x, numbers, scales), np.float32)
    exact = np.asarray(x, np.float64) @ dequantised(numbers, scales).T
    assert (found == np.asarray(jnp.asarray(exact, jnp.bfloat16), np.float32)).mean() > 0.99
    by_rounded = (
        np.asarray(x, np.float64)
        @ np.asarray(jnp.asarray(dequantised(numbers, scales), jnp.bfloat16), np.float64).T
    )
    assert (np.asarray(jnp.asarray(by_rounded, jnp.bfloat16)) == found).mean() < 0.99


def test_the_nearest_e4m3_ties_to_even_and_the_largest_is_kept():
    given = np.array([0.0, 17.0, 19.0, -17.0, 448.0, 463.0, 465.0, 1e9, -1e9, 2.0**-10], np.float32)
    wanted = [0, 16, 20, -16, 448, 448, 448, 448, -448, 0]
    for numbers in (given, jnp.asarray(given)):
        assert np.asarray(rounded(numbers), np.float32).tolist() == wanted


def test_scales_of_pieces_of_a_row():
    rows = jnp.zeros((2, 2, 4)).at[0, 1, 2].set(-896.0).at[1, 0].set(1e-30)
    _, by_piece = quantised_pieces(rows, whole_rows=False)
    tiny = np.float32(1e-10) / np.float32(448)
    np.testing.assert_allclose(by_piece, [[tiny, 2.0], [tiny, tiny]], rtol=1e-6)
    _, by_row = quantised_pieces(rows, whole_rows=True)
    least = 1 / (448 * 512)
    np.testing.assert_allclose(by_row, [[least, 2.0], [least, least]], rtol=1e-6)


@pytest.mark.parametrize("on_device", [False, True])
def test_blocks_are_scaled_to_the_largest_e4m3(on_device):
    random = np.random.default_rng(0)
    whole = random.normal(size=(256, 384)).astype(np.float32)
    whole[:128, :128] *= 2**-20
    whole[128:, 256:] = 0
    numbers, scales = quantised_blocks(jnp.asarray(whole) if on_device else whole)
    assert numbers.dtype == E4M3 and scales.dtype == np.float32 and scales.shape == (2, 3)
    by_block = abs(np.asarray(numbers, np.float32)).reshape(2, 128, 3, 128).max(axis=(1, 3))
    assert by_block.tolist() == [[448] * 3, [448, 448, 0]]
    # Half a unit in the last of four bits; below the smallest normal number, half of 2^-9.
    off = abs(dequantised(numbers, scales) - whole)
    allowed = np.maximum(abs(whole) / 16, np.asarray(scales).repeat(128, 0).repeat(128, 1) * 2**-10)
    assert (off <= allowed * (1 + 1e-6)).all()


def test_there_is_no_kernel_and_that_is_said():
    numbers, scales = matrix(128, 128, channels=False)
    with pytest.raises(NotForThisKernel, match="fp8_product on 'mosaic': it does not exist"):
        fp8_product(jnp.zeros((1, 128)), numbers, scales, implementation="mosaic")
