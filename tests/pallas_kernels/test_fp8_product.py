"""Products with 8-bit matrices: exact in their numbers, with every scale where it belongs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h100 import assert_no_spills, compiled, needs_compiler, placed
from interpreter import no_races

from pallas_kernels import NotForThisKernel, fp8_product
from pallas_kernels.fp8_product import (
    BLOCK,
    E4M3,
    mosaic,
    plan,
    quantised_blocks,
    reference,
    row_tiles,
)
from pallas_kernels.fp8_product.api import FP8_PRODUCT
from pallas_kernels.fp8_product.plan import Split
from pallas_kernels.fp8_product.plan_of import plan_of
from pallas_kernels.fp8_product.quantise import quantised_pieces, rounded


def matrix(outputs: int, inputs: int, channels: bool, seed: int = 0):
    """Numbers and scales, of which neighbouring ones differ by powers of two."""
    random = np.random.default_rng(seed)
    shape = (outputs, 1) if channels else (outputs // BLOCK, inputs // BLOCK)
    some = random.normal(size=2**16, scale=100).clip(-448, 448).astype(E4M3)
    numbers = some[random.integers(2**16, size=(outputs, inputs), dtype=np.uint16)]
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


def relative_error(found, x, numbers, scales) -> float:
    wanted = np.asarray(x, np.float64) @ dequantised(numbers, scales).T
    return np.linalg.norm(np.asarray(found, np.float64) - wanted) / np.linalg.norm(wanted)


def inputs_of(tokens: tuple[int, ...], inputs: int, seed: int = 0):
    return jax.random.normal(jax.random.key(seed), (*tokens, inputs), jnp.bfloat16)


@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs", "channels"),
    [
        ((5,), 128, 512, False),  # four parts
        ((2, 8), 256, 384, True),
        ((16,), 128, 4096, False),  # more steps than pipeline stages
        ((130,), 128, 256, False),  # two tiles of rows, the second with padding
        ((9,), 384, 640, True),
    ],
)
def test_interpreted(tokens, outputs, inputs, channels):
    numbers, scales = matrix(outputs, inputs, channels)
    x = inputs_of(tokens, inputs)
    with no_races() as interpret:
        parts = mosaic.fp8_product(x, numbers, scales, interpret=interpret)
    assert parts.shape[1:] == (*tokens, outputs)
    rounding = 1e-6 if len(parts) > 1 else 3e-3
    assert parts.dtype == (jnp.float32 if len(parts) > 1 else jnp.bfloat16)
    assert relative_error(parts.sum(axis=0, dtype=jnp.float32), x, numbers, scales) < rounding


@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs", "split"),
    [
        # Up to 64 rows every multiprocessor reads: Qwen3-8B's out, down, qkv, gate and up.
        (16, 4096, 4096, (128, 4)),
        (16, 4096, 12288, (128, 4)),
        (64, 6144, 4096, (128, 4)),
        (64, 24576, 4096, (128, 1)),
        # More rows, 132 thread blocks at once: one round of 192 outputs is shorter than two of 128.
        (128, 24576, 4096, (192, 1)),
        (128, 6144, 4096, (192, 4)),
        (128, 4096, 4096, (128, 4)),
        (512, 4096, 4096, (128, 1)),
        # Rows for many rounds: the widest tile.
        (2048, 24576, 4096, (256, 1)),
        # Few rows, 264 thread blocks at once: eight that are left over would take as long again.
        (16, 34816, 5120, (128, 4)),
        (16, 51200, 5120, (128, 1)),
        # Every part has a multiple of 128 inputs.
        (16, 4096, 768, (128, 2)),
        (16, 4096, 640, (128, 1)),
    ],
)
def test_the_split(tokens, outputs, inputs, split, monkeypatch):
    monkeypatch.setattr(plan, "MEASURED", {})
    assert plan_of(*shapes(tokens, outputs, inputs)).split == Split(*split)


EVERY_WAY_TO_SPLIT = [(6144, 4096, tokens) for tokens in (1, 33, 64, 65, 128, 300, 512)] + [
    (2560, 9728, tokens) for tokens in (16, 65, 128, 300, 512)
]
"""Of up to 512 rows of these matrices: every tile with every number of parts, row tiles and rows
that the plan gives them."""


def way_to_split(outputs: int, inputs: int, tokens: int) -> tuple:
    made = plan_of(*shapes(tokens, outputs, inputs))
    return made.split, made.row_tiles, made.rows


def test_the_device_sees_every_way_to_split():
    wanted = {
        way_to_split(*matrix, tokens)
        for matrix in ((6144, 4096), (2560, 9728))
        for tokens in (1, 8, 16, 33, 64, 65, 128, 300, 512)
    }
    assert {way_to_split(*case) for case in EVERY_WAY_TO_SPLIT} == wanted


def shapes(tokens: int, outputs: int, inputs: int, channels: bool = False):
    of_scales = (outputs, 1) if channels else (outputs // BLOCK, inputs // BLOCK)
    return (
        jax.ShapeDtypeStruct((tokens, inputs), jnp.bfloat16),
        jax.ShapeDtypeStruct((outputs, inputs), E4M3),
        jax.ShapeDtypeStruct(of_scales, jnp.float32),
    )


@pytest.mark.parametrize("tokens", [1, 7, 64, 65, 128, 129, 500, 2048])
def test_thread_blocks_have_all_rows(tokens):
    made = plan_of(*shapes(tokens, 256, 256))
    assert tokens <= made.padded < tokens + 8 * made.row_tiles
    assert made.rows % 8 == 0 and 8 <= made.rows <= row_tiles.MOST_ROWS
    assert made.stages >= 3


def test_a_measured_split_is_taken(monkeypatch):
    monkeypatch.setitem(plan.MEASURED, (128, 4096, 4096, "bfloat16"), (128, 1))
    given = shapes(128, 4096, 4096)
    assert plan_of(*given).split == Split(128, 1)
    assert plan_of(*given, quantise_inputs=True).split == Split(128, 2)
    assert plan_of(*given, interpreted=True).split == Split(128, 4)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"x": ((8, 256), "float32")}, "inputs in float32; expected bfloat16"),
        ({"x": ((0, 256), "bfloat16")}, "no tokens; expected at least one"),
        ({"weight": ((256, 256), "float8_e5m2")}, "a matrix in float8_e5m2; expected float8_e4m3"),
        ({"scales": ((2, 2), "bfloat16")}, "scales in bfloat16; expected float32"),
        ({"scales": ((2, 1), "float32")}, r"scales of shape \(2, 1\); expected \(2, 2\) or"),
        (
            {"weight": ((192, 256), E4M3), "scales": ((192, 1), "float32")},
            "192 outputs; expected a multiple of 128",
        ),
        (
            {"x": ((8, 64), "bfloat16"), "weight": ((256, 64), E4M3)},
            "64 inputs; expected a multiple of 128",
        ),
    ],
)
def test_what_the_kernel_cannot_do(change, reason):
    names = ("x", "weight", "scales")
    given = dict(zip(names, shapes(8, 256, 256)))
    given |= {name: jax.ShapeDtypeStruct(*what) for name, what in change.items()}
    with pytest.raises(NotForThisKernel, match=reason):
        FP8_PRODUCT.choice("mosaic", *given.values())


@needs_compiler
@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs", "channels"),
    [
        (8, 4096, 4096, False),
        (32, 6144, 4096, True),
        (64, 24576, 4096, False),
        (112, 4096, 12288, False),  # no product that a whole step has: those are compiled once
        (512, 4096, 4096, True),
    ],
)
def test_it_compiles_without_spills(tokens, outputs, inputs, channels, monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    given = placed(shapes(tokens, outputs, inputs, channels))
    program = compiled(jax.jit(mosaic.fp8_product).lower(*given))
    output = "".join(capfd.readouterr())
    assert_no_spills(output)
    # Hopper has no instruction from e4m3 to bfloat16.
    assert "cvt.rn.f16x2.e4m3x2" in output and "bf16x2.e4m3x2" not in output
    assert program.memory_analysis().temp_size_in_bytes < 1e6


SPLITS_OF_MANY_ROWS = [(80, 128), (128, 192), (300, 192), (128, 256), (512, 256)]


def product_in_tiles(tile: int):
    return functools.partial(mosaic.fp8_product, split=Split(tile, 1))


@needs_compiler
@pytest.mark.parametrize(("tokens", "tile"), SPLITS_OF_MANY_ROWS)
@pytest.mark.parametrize("channels", [False, True])
def test_wide_tiles_compile_without_spills(tokens, tile, channels, monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    given = placed(shapes(tokens, 3072, 4096, channels))
    compiled(jax.jit(product_in_tiles(tile)).lower(*given))
    assert_no_spills("".join(capfd.readouterr()))


@pytest.mark.parametrize(("tokens", "tile", "channels"), [(80, 192, True), (130, 256, False)])
def test_wide_tiles_interpreted(tokens, tile, channels):
    """More steps than pipeline stages, and tiles that begin within a scale's block."""
    numbers, scales = matrix(768, 512, channels)
    x = inputs_of((tokens,), 512)
    with no_races() as interpret:
        found = product_in_tiles(tile)(x, numbers, scales, interpret=interpret)
    assert relative_error(found[0], x, numbers, scales) < 3e-3


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "tile"), SPLITS_OF_MANY_ROWS)
@pytest.mark.parametrize("channels", [False, True])
def test_tiles_change_no_bit_on_device(tokens, tile, channels):
    numbers, scales = matrix(3072, 4096, channels)
    x = inputs_of((tokens,), 4096)
    narrow, wide = (jax.jit(product_in_tiles(tile)) for tile in (128, tile))
    wanted = narrow(x, numbers, scales)
    for _ in range(20):
        np.testing.assert_array_equal(wide(x, numbers, scales), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize(("outputs", "inputs", "tokens"), EVERY_WAY_TO_SPLIT)
def test_on_device(outputs, inputs, tokens, channels):
    numbers, scales = matrix(outputs, inputs, channels)
    x = inputs_of((tokens,), inputs)
    product = jax.jit(functools.partial(fp8_product, implementation="mosaic"))
    found = product(x, numbers, scales)
    assert relative_error(found, x, numbers, scales) < 3e-3
    np.testing.assert_array_equal(found, product(x, numbers, scales))


@pytest.mark.gpu
def test_a_row_does_not_depend_on_its_neighbours():
    numbers, scales = matrix(4096, 4096, channels=False)
    x = inputs_of((64,), 4096)
    product = jax.jit(functools.partial(fp8_product, implementation="mosaic"))
    rolled = product(jnp.roll(x, 9, axis=0).at[:9].set(0), numbers, scales)
    np.testing.assert_array_equal(product(x, numbers, scales)[:-9], rolled[9:])
