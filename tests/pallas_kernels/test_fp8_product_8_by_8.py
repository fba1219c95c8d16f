"""Products of two sides in 8 bits: the rows are rounded as they should be, and nothing else is."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h100 import UNTUNED, assert_no_spills, compiled, needs_compiler, placed
from interpreter import no_races
from test_fp8_product import dequantised, inputs_of, matrix, shapes

from pallas_kernels import fp8_product
from pallas_kernels.dispatch import Choice
from pallas_kernels.fp8_product import BLOCK, E4M3, mosaic, plan, plan_8_by_8_many_rows, reference
from pallas_kernels.fp8_product.api import FP8_PRODUCT
from pallas_kernels.fp8_product.plan import Split
from pallas_kernels.fp8_product.plan_of import plan_of
from pallas_kernels.fp8_product.quantise import quantised_pieces

OF_8B = {"qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
"""Outputs and inputs of the matrices of Qwen3-8B."""
EVERY_WAY_TO_SPLIT = [
    ("qkv", 1),
    ("qkv", 64),
    ("qkv", 128),
    ("qkv", 300),
    ("qkv", 512),
    ("out", 300),
    ("out", 512),
    ("gate_up", 8),
    ("gate_up", 64),
    ("gate_up", 128),
    ("gate_up", 2048),
    ("down", 300),
    ("down", 2048),
]
"""Of up to 2048 rows of these matrices: every tile with every number of parts, row tiles and rows
that the plan gives them."""
rounding_plan = functools.partial(plan_of, quantise_inputs=True)
rounding_product = functools.partial(mosaic.fp8_product, quantise_inputs=True)


def rounded_rows(x, channels: bool) -> np.ndarray:
    """Rows times scales, after they were rounded to 8 bits, in float64."""
    wide = np.asarray(x, np.float32)
    pieces = wide.reshape(len(wide), -1, wide.shape[1] if channels else BLOCK)
    largest = abs(pieces).max(axis=-1, keepdims=True)
    scales = largest / np.float32(448)
    numbers = (pieces / scales).clip(-448, 448).astype(E4M3)
    return (numbers.astype(np.float64) * scales).reshape(wide.shape)


def exact_product(x, numbers, scales) -> np.ndarray:
    return rounded_rows(x, scales.shape[1] == 1) @ dequantised(numbers, scales).T


def relative_error(found, wanted) -> float:
    wanted = np.asarray(wanted, np.float64)
    return np.linalg.norm(np.asarray(found, np.float64) - wanted) / np.linalg.norm(wanted)


def unequal_inputs(tokens: int, inputs: int):
    """Rows whose pieces differ by powers of two, so that a scale in the wrong place is seen."""
    scales = 2.0 ** np.random.default_rng(1).integers(-6, 6, (tokens, inputs // BLOCK, 1))
    x = inputs_of((tokens,), inputs).reshape(tokens, -1, BLOCK)
    return (x * scales.astype(x.dtype)).reshape(tokens, inputs)


@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs", "channels"),
    [
        (1, 128, 512, False),  # four parts
        (5, 256, 384, True),
        (24, 128, 2048, True),
        (16, 128, 4096, False),  # more steps than pipeline stages
        (130, 256, 256, False),  # two tiles of rows, the second with padding
    ],
)
def test_interpreted(tokens, outputs, inputs, channels):
    numbers, scales = matrix(outputs, inputs, channels)
    x = unequal_inputs(tokens, inputs)
    with no_races() as interpret:
        parts = rounding_product(x, numbers, scales, interpret=interpret)
    assert parts.shape == (rounding_plan(x, numbers, scales).parts, tokens, outputs)
    assert parts.dtype == (jnp.float32 if len(parts) > 1 else jnp.bfloat16)
    rounding = 1e-6 if len(parts) > 1 else 3e-3
    found = parts.sum(axis=0, dtype=jnp.float32)
    assert relative_error(found, exact_product(x, numbers, scales)) < rounding
    of_reference = reference.fp8_product(x, numbers, scales, quantise_inputs=True)[0]
    assert relative_error(found, of_reference) < 3e-3


@pytest.mark.parametrize(
    ("tokens", "split", "channels"),
    [
        (130, (128, 1), False),  # two steps at a time
        (130, (128, 2), True),  # three steps for each part, one at a time
        (72, (192, 1), True),
        (130, (192, 1), False),  # tiles that begin within a scale's block
        (72, (256, 1), True),
        (130, (256, 2), False),
    ],
)
def test_many_rows_interpreted(tokens, split, channels, monkeypatch):
    """More steps than pipeline stages, and thread blocks with several tiles."""
    monkeypatch.setattr(plan_8_by_8_many_rows, "MULTIPROCESSORS", 2)
    monkeypatch.setattr(plan_8_by_8_many_rows, "MOVES_REGISTERS", True)
    mosaic.product_of_rows.clear_cache()  # otherwise an equal call would keep its grid
    numbers, scales = matrix(768, 768, channels)
    x = unequal_inputs(tokens, 768)
    assert rounding_plan(x, numbers, scales, split=Split(*split)).thread_blocks == 2
    with no_races() as interpret:
        parts = rounding_product(x, numbers, scales, split=Split(*split), interpret=interpret)
    mosaic.product_of_rows.clear_cache()
    rounding = 1e-6 if len(parts) > 1 else 3e-3
    found = parts.sum(axis=0, dtype=jnp.float32)
    assert relative_error(found, exact_product(x, numbers, scales)) < rounding


def test_a_row_does_not_depend_on_its_neighbours():
    numbers, scales = matrix(128, 512, channels=False)
    x = unequal_inputs(16, 512)
    other = jnp.where((jnp.arange(16) < 9)[:, None], jnp.bfloat16(300), x)
    found = []
    for given in (x, other):
        with no_races() as interpret:
            found.append(rounding_product(given, numbers, scales, interpret=interpret)[:, 9:])
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize(
    ("tokens", "which", "split"),
    [
        # Few rows: as many multiprocessors as there are read.
        (16, "out", (128, 4)),
        (64, "gate_up", (128, 1)),
        # More rows: a wide tile if it does not leave multiprocessors idle.
        (128, "out", (128, 2)),
        (128, "gate_up", (192, 1)),
        (300, "out", (128, 1)),
        (300, "down", (128, 1)),
        (512, "out", (128, 1)),
        (512, "gate_up", (256, 1)),
        (2048, "out", (256, 1)),
        (2048, "gate_up", (256, 1)),
    ],
)
def test_the_split(tokens, which, split, monkeypatch):
    monkeypatch.setattr(plan, "MEASURED", {})
    monkeypatch.setattr(plan_8_by_8_many_rows, "MOVES_REGISTERS", True)
    assert rounding_plan(*shapes(tokens, *OF_8B[which])).split == Split(*split)


@pytest.mark.parametrize("which", OF_8B)
def test_without_registers_of_the_loading_warpgroup_tiles_are_narrow(which, monkeypatch):
    monkeypatch.setattr(plan_8_by_8_many_rows, "MOVES_REGISTERS", False)
    for tokens in (128, 512):
        made = rounding_plan(*shapes(tokens, *OF_8B[which]))
        assert (made.tile, made.steps_at_once) == (128, 1)


def test_outputs_that_are_no_whole_wide_tiles_are_split_into_narrow_ones():
    assert rounding_plan(*shapes(2048, 128 * 33, 4096)).tile == 128


def way_to_split(which: str, tokens: int) -> tuple:
    made = rounding_plan(*shapes(tokens, *OF_8B[which]))
    return made.split, made.row_tiles, made.rows


def test_the_device_sees_every_way_to_split(monkeypatch):
    monkeypatch.setattr(plan_8_by_8_many_rows, "MOVES_REGISTERS", True)
    tokens = (1, 8, 64, 128, 300, 512, 2048)
    wanted = {way_to_split(which, count) for which in OF_8B for count in tokens}
    assert {way_to_split(*case) for case in EVERY_WAY_TO_SPLIT} == wanted


@pytest.mark.parametrize("tokens", [1, 7, 64, 65, 128, 129, 500, 2048])
@pytest.mark.parametrize("channels", [False, True])
def test_thread_blocks_have_all_rows(tokens, channels):
    made = rounding_plan(*shapes(tokens, 24576, 4096, channels))
    few = tokens <= 64
    assert made.rows * made.row_tiles == made.padded
    assert tokens <= made.padded < tokens + (8 if few else 128)
    assert made.rows % 8 == 0 if few else made.rows == 128
    narrower = rounding_plan(
        *shapes(tokens, 24576, 4096, channels), split=Split(128 if few else 192, 1)
    )
    assert narrower.stages >= 4 and made.stages >= (3 if made.tile == 256 else 4)


@pytest.mark.parametrize("tokens", [1, 8, 40, 104, 128, 300])
def test_copies_of_row_scales_begin_at_multiples_of_128_bytes(tokens):
    """Elsewhere a bulk copy ends the program; neither interpreter nor compiler say so."""
    made = rounding_plan(*shapes(tokens, 256, 512))
    assert made.scales_at_once >= made.rows
    assert made.scales_at_once * 4 % 128 == 0


@pytest.mark.parametrize("channels", [False, True])
def test_the_kernel_is_chosen(channels):
    given = shapes(8, 256, 256, channels)
    assert FP8_PRODUCT.choice("mosaic", *given, quantise_inputs=True) == Choice("mosaic")


@needs_compiler
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize(
    ("tokens", "which"),
    [(16, "out"), (64, "qkv"), (128, "gate_up"), (512, "down"), (512, "qkv"), (2048, "down")],
)
def test_it_compiles_without_spills(tokens, which, channels, monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    given = shapes(tokens, *OF_8B[which], channels)
    program = compiled(jax.jit(rounding_product).lower(*placed(given)))
    output = "".join(capfd.readouterr())
    assert_no_spills(output)
    assert "'setmaxnreg' ignored" not in output
    assert ".f32.e4m3.e4m3" in output
    # The rounded rows, and scales of their pieces twice, once before they are transposed.
    (_, inputs), rows = given[1].shape, rounding_plan(*given).padded
    most = rows * (inputs + 2 * 4 * inputs // BLOCK) + 1e5
    assert program.memory_analysis().temp_size_in_bytes < most


def products_in_float32(x, numbers, scales):
    """By XLA, in programs of their own: in one it may multiply the numbers in 8 bits too, with sums
    as inexact as the tensor core's."""
    tokens, inputs = x.shape
    whole_rows = scales.shape[1] == 1
    pieces = x.reshape(tokens, 1 if whole_rows else inputs // BLOCK, -1)
    rounded, row_scales = jax.jit(quantised_pieces, static_argnums=1)(pieces, whole_rows)
    rows = jax.jit(in_float32)(rounded.reshape(x.shape), row_scales)
    return in_full_precision(rows, jax.jit(in_float32)(numbers, scales))


@functools.partial(jax.jit, compiler_options=UNTUNED)
def in_full_precision(rows, matrix):
    return jnp.matmul(rows, matrix.T, precision="highest")


def in_float32(numbers, scales):
    """A matrix of numbers with scales of blocks of its rows and columns."""
    down, along = (size // of for size, of in zip(numbers.shape, scales.shape))
    return numbers.astype(jnp.float32) * scales.repeat(down, 0).repeat(along, 1)


@pytest.mark.parametrize("channels", [False, True])
def test_the_products_that_the_device_is_held_against(channels):
    numbers, scales = matrix(256, 384, channels)
    x = unequal_inputs(5, 384)
    wanted = exact_product(x, numbers, scales)
    assert relative_error(products_in_float32(x, numbers, scales), wanted) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize(("which", "tokens"), EVERY_WAY_TO_SPLIT)
def test_on_device(which, tokens, channels):
    """A bfloat16 that is rounded once is off by 1.7e-3 in the mean of squares. The tensor core cuts
    off products 2^-13 below the largest of a sum, four times in 128 inputs, which is less than 1e-3
    of such a sum."""
    numbers, scales = matrix(*OF_8B[which], channels)
    x = unequal_inputs(tokens, OF_8B[which][1])
    options = {"quantise_inputs": True, "implementation": "mosaic"}
    product = jax.jit(functools.partial(fp8_product, **options))
    found = product(x, numbers, scales)
    assert relative_error(found, products_in_float32(x, numbers, scales)) < 3e-3
    np.testing.assert_array_equal(found, product(x, numbers, scales))


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [False, True])
def test_a_row_does_not_depend_on_the_other_rows_on_device(channels):
    """Not on what they are, and not on how many while the inputs are in as many parts."""
    numbers, scales = matrix(*OF_8B["out"], channels)
    x = unequal_inputs(128, 4096)
    product = jax.jit(functools.partial(rounding_product, split=Split(128, 4)))
    found = product(x, numbers, scales)
    rolled = product(jnp.roll(x, 9, axis=0).at[:9].set(0), numbers, scales)
    np.testing.assert_array_equal(found[:, :-9], rolled[:, 9:])
    for tokens in (1, 16, 33, 64, 120):
        few = product(x[:tokens], numbers, scales)
        assert len(few) == len(found) == 4
        np.testing.assert_array_equal(found[:, :tokens], few)


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize(
    ("which", "tile", "tokens"), [("out", 256, 300), ("down", 256, 2048), ("qkv", 192, 300)]
)
def test_wide_and_narrow_tiles_give_the_same_bits_on_device(which, tile, tokens, channels):
    numbers, scales = matrix(*OF_8B[which], channels)
    x = unequal_inputs(tokens, OF_8B[which][1])
    narrow, wide = (
        jax.jit(functools.partial(rounding_product, split=Split(tile, 1)))(x, numbers, scales)
        for tile in (128, tile)
    )
    np.testing.assert_array_equal(narrow, wide)
