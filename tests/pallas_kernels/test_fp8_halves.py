"""Inputs in 16 bits as two numbers in 8 bits each: nearly nothing of them is lost."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h100 import assert_no_spills, compiled, needs_compiler, placed
from interpreter import no_races
from test_fp8_product import dequantised, inputs_of, matrix, relative_error, shapes
from test_fp8_product_8_by_8 import OF_8B, unequal_inputs

from pallas_kernels.fp8_product import BLOCK, mosaic, plan
from pallas_kernels.fp8_product.plan import Split
from pallas_kernels.fp8_product.plan_8_by_8 import PlanOfHalves
from pallas_kernels.fp8_product.plan_of import plan_of
from pallas_kernels.fp8_product.quantise import halved, powers_of_two


def product(tile: int = 128, parts: int = 1):
    return functools.partial(mosaic.fp8_product, split=Split(tile, parts, halved=True))


def there_and_back(pieces) -> tuple[np.ndarray, np.ndarray]:
    """Pieces [pieces, inputs] as the sums of their halves, and as they were, in float64."""
    wide = jnp.asarray(pieces, jnp.float32)
    scales = powers_of_two(abs(wide).max(axis=1, keepdims=True))
    high, low = (np.asarray(half, np.float64) for half in halved(wide, scales))
    return (high + low) * np.asarray(scales, np.float64), np.asarray(wide, np.float64)


def all_bfloat16_from(smallest: int, largest: int) -> np.ndarray:
    """Every bfloat16 between two powers of two."""
    steps = 2.0 ** np.arange(smallest, largest)[:, None] * (1 + np.arange(128) / 128)
    return steps.astype(jnp.bfloat16).ravel()


@pytest.mark.parametrize("power", [-100, -20, 0, 30, 127])
def test_numbers_that_are_not_small_beside_the_largest_are_halved_exactly(power):
    numbers = all_bfloat16_from(power - 9, power + 1)
    found, wanted = there_and_back(np.stack([numbers, -numbers]))
    np.testing.assert_array_equal(found, wanted)


def test_of_smaller_numbers_no_more_is_lost_than_a_small_part_of_the_largest():
    """A bfloat16 as large as the largest is off by up to 2^-9 of it, 256 times as much."""
    numbers = all_bfloat16_from(-40, 1)
    found, wanted = there_and_back(numbers[None])
    off = abs(found - wanted)[0]
    assert 2**-18 < off.max() <= 2**-17
    assert off[numbers >= 2**-9].max() == 0
    assert (off <= abs(wanted[0])).all()


@pytest.mark.parametrize("largest", [0.0, 2.0**-149, 2.0**-133, 1e-35])
def test_numbers_near_zero(largest):
    """Of pieces without any larger number, what is below 2^-117 is lost."""
    found, wanted = there_and_back(np.full((1, BLOCK), largest).astype(jnp.bfloat16))
    assert abs(found - wanted).max() <= 2**-117
    assert (found == 0).all() or largest > 0


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs", "tile", "parts"),
    [
        (5, 256, 512, 128, 2),
        (16, 128, 2048, 128, 1),  # more steps than pipeline stages
        (130, 384, 1024, 192, 1),  # two tiles of rows, the second with padding
        (72, 512, 768, 256, 2),
    ],
)
def test_interpreted(tokens, outputs, inputs, tile, parts, channels):
    numbers, scales = matrix(outputs, inputs, channels)
    x = unequal_inputs(tokens, inputs)
    with no_races() as interpret:
        found = product(tile, parts)(x, numbers, scales, interpret=interpret)
    assert found.shape == (parts, tokens, outputs)
    # Pieces that differ by 2^12 lose more if all have the scale of the row.
    lost = 2e-5 if channels else 5e-6
    rounding = lost if parts > 1 else 3e-3
    total = found.sum(axis=0, dtype=jnp.float32)
    assert relative_error(total, x, numbers, scales) < rounding


@pytest.mark.parametrize("channels", [False, True])
def test_one_huge_number_costs_less_than_its_own_rounding(channels):
    """The smaller numbers of its piece lose bits, but a bfloat16 of its size has been rounded
    before, which changes the product more."""
    numbers, scales = matrix(128, 512, channels)
    x = inputs_of((8,), 512).at[:, 77].set(3e4)
    with no_races() as interpret:
        found = product(parts=2)(x, numbers, scales, interpret=interpret).sum(axis=0)
    exact = np.asarray(x, np.float64) @ dequantised(numbers, scales).T
    of_rounding = abs(dequantised(numbers, scales)[:, 77]).mean() * 3e4 * 2**-9 / np.sqrt(3)
    assert np.sqrt(np.square(np.asarray(found, np.float64) - exact).mean()) < of_rounding / 4


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_leaves_no_finite_product_of_its_row(bad, channels):
    numbers, scales = matrix(128, 512, channels)
    x = inputs_of((8,), 512)
    found = []
    for given in (x, x.at[3, 200].set(bad)):
        with no_races() as interpret:
            found.append(np.asarray(product()(given, numbers, scales, interpret=interpret)[0]))
    assert not np.isfinite(found[1][3].astype(np.float32)).any()
    others = np.arange(8) != 3
    np.testing.assert_array_equal(found[0][others], found[1][others])


def test_a_row_does_not_depend_on_its_neighbours():
    numbers, scales = matrix(128, 512, channels=False)
    x = unequal_inputs(16, 512)
    other = jnp.where((jnp.arange(16) < 9)[:, None], jnp.bfloat16(300), x)
    found = []
    for given in (x, other):
        with no_races() as interpret:
            found.append(product()(given, numbers, scales, interpret=interpret)[:, 9:])
    np.testing.assert_array_equal(*found)


def test_inputs_are_halved_where_that_was_measured_to_be_faster(monkeypatch):
    given = shapes(128, *OF_8B["qkv"])
    monkeypatch.setattr(plan, "MEASURED", {(128, 6144, 4096, "bfloat16"): (256, 2, True)})
    made = plan_of(*given)
    assert isinstance(made, PlanOfHalves) and made.split == Split(256, 2, halved=True)
    assert not isinstance(plan_of(*given, quantise_inputs=True), PlanOfHalves)
    assert not isinstance(plan_of(*given, interpreted=True), PlanOfHalves)
    monkeypatch.setattr(plan, "MEASURED", {})
    assert not isinstance(plan_of(*given), PlanOfHalves)


TILES = [(16, 128), (64, 128), (128, 128), (128, 192), (300, 192), (512, 256)]


@needs_compiler
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize(("tokens", "tile"), TILES)
def test_it_compiles_without_spills(tokens, tile, channels, monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    given = shapes(tokens, 3072, 4096, channels)
    made = plan_of(*given, split=Split(tile, 1, halved=True))
    assert made.stages >= 3
    program = compiled(jax.jit(product(tile)).lower(*placed(given)))
    output = "".join(capfd.readouterr())
    assert_no_spills(output)
    assert "serialized" not in output
    # Padded rows, their halves, and scales of their pieces twice.
    most = made.padded * (2 * 4096 + 2 * 4096 + 2 * 4 * 4096 // BLOCK) + 1e5
    assert program.memory_analysis().temp_size_in_bytes < most


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("tokens", [1, 16, 64, 128, 300, 512])
@pytest.mark.parametrize("which", OF_8B)
def test_on_device(tokens, which, channels):
    """In parts, which are float32: what the tensor core cuts off is less than the rounding of a
    result in bfloat16, 1.7e-3."""
    numbers, scales = matrix(*OF_8B[which], channels)
    x = unequal_inputs(tokens, OF_8B[which][1])
    found = jax.jit(product(parts=2))(x, numbers, scales)
    assert relative_error(found.sum(axis=0), x, numbers, scales) < 8e-4
    np.testing.assert_array_equal(found, jax.jit(product(parts=2))(x, numbers, scales))


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize(("tokens", "tile"), TILES)
def test_tiles_and_neighbours_change_no_bit_on_device(tokens, tile, channels):
    numbers, scales = matrix(3072, 4096, channels)
    x = unequal_inputs(tokens, 4096)
    wanted = jax.jit(product())(x, numbers, scales)
    wide = jax.jit(product(tile))
    for _ in range(20):
        np.testing.assert_array_equal(wide(x, numbers, scales), wanted)
    few = -(-tokens // 3)
    rolled = wide(jnp.roll(x, few, axis=0).at[:few].set(0), numbers, scales)
    np.testing.assert_array_equal(wanted[:, :-few], rolled[:, few:])
