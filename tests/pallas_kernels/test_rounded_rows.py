"""Activations that are rounded to 8 bits where they are made: the same bits as rounded later."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h100 import assert_no_spills, compiled, needs_compiler, placed
from interpreter import no_races
from test_add_norm import EPS, inputs
from test_fp8_product import matrix

from pallas_kernels import NotForThisKernel, add_norm, fp8_product, silu_gate
from pallas_kernels.add_norm import mosaic as norms
from pallas_kernels.add_norm.api import ADD_NORM
from pallas_kernels.fp8_product import BLOCK, RoundedRows
from pallas_kernels.fp8_product import mosaic as products
from pallas_kernels.fp8_product.api import FP8_PRODUCT
from pallas_kernels.fp8_product.rounded import rounded_rows, scales_by_row
from pallas_kernels.fp8_product.rounding import round_rows
from pallas_kernels.silu_gate import mosaic as gates
from pallas_kernels.silu_gate.api import SILU_GATE

ROUNDINGS = pytest.mark.parametrize("rounding", ["pieces", "rows"])
BF16 = jnp.dtype(jnp.bfloat16)


def same(found: RoundedRows, wanted: RoundedRows) -> None:
    assert found.numbers.shape == wanted.numbers.shape and found.dtype == wanted.dtype
    assert found.scales.shape == wanted.scales.shape, "padding and all"
    for one, other in (
        (found.numbers.astype(jnp.float32), wanted.numbers.astype(jnp.float32)),
        (scales_by_row(found), scales_by_row(wanted)),
    ):
        np.testing.assert_array_equal(one, other)


def by_kernel(x, rounding, interpret=None) -> RoundedRows:
    """Rows as the kernel rounds them that has nothing else to do."""
    numbers, scales = round_rows(x.reshape(-1, x.shape[-1]), rounding, interpret)
    tokens = x.size // x.shape[-1]
    return RoundedRows(numbers[:tokens].reshape(x.shape), scales, x.dtype)


def unequal(x):
    """Pieces that differ by powers of two, so that a scale in the wrong place is seen."""
    powers = np.random.default_rng(1).integers(-6, 6, (*x.shape[:-1], x.shape[-1] // BLOCK, 1))
    pieces = x.reshape(powers.shape[:-1] + (BLOCK,))
    return (pieces * (2.0**powers).astype(x.dtype)).reshape(x.shape)


@ROUNDINGS
@pytest.mark.parametrize("tokens", [(3,), (2, 65)])
def test_every_row_finds_its_scales_in_the_tiles(tokens, rounding):
    x = unequal(jax.random.normal(jax.random.key(0), (*tokens, 512), BF16))
    found = rounded_rows(x, rounding)
    in_pieces = np.prod(tokens), -1, 512 if rounding == "rows" else BLOCK
    wide = np.asarray(x, np.float32).reshape(in_pieces)
    np.testing.assert_allclose(scales_by_row(found), abs(wide).max(-1) / 448, rtol=1e-6)
    assert found.scales.shape[2] % 32 == 0


@pytest.mark.parametrize("channels", [False, True])
def test_no_rows_have_no_products(channels):
    numbers, scales = matrix(128, 384, channels)
    x = jnp.zeros((2, 0, 384), BF16)
    assert fp8_product(x, numbers, scales, quantise_inputs=True).shape == (2, 0, 128)


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("tokens", [(2, 5), (130,)])
@pytest.mark.parametrize("kernels", [False, True])
def test_a_product_takes_rows_that_are_rounded(tokens, channels, kernels):
    if kernels and tokens == (130,) and channels:
        pytest.skip("the interpreter is slow, and the scales of blocks go the same way")
    numbers, scales = matrix(128, 384, channels)
    x = unequal(jax.random.normal(jax.random.key(0), (*tokens, 384), BF16))
    rounded = rounded_rows(x, "rows" if channels else "pieces")
    if not kernels:
        wanted = fp8_product(x, numbers, scales, quantise_inputs=True)
        np.testing.assert_array_equal(fp8_product(rounded, numbers, scales), wanted)
        return
    with no_races() as interpret:
        found = products.fp8_product(rounded, numbers, scales, interpret=interpret)
    with no_races() as interpret:
        options = {"quantise_inputs": True, "interpret": interpret}
        wanted = products.fp8_product(x, numbers, scales, **options)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(("rounding", "parts"), [("pieces", 1), ("rows", 2)])
def test_a_norm_is_rounded_as_it_would_be_later(rounding, parts):
    given = inputs((9, 1024), "bfloat16", parts)
    with no_races() as interpret:
        total, found = norms.add_norm(*given, eps=EPS, rounding=rounding, interpret=interpret)
    with no_races() as interpret:
        wanted = norms.add_norm(*given, eps=EPS, interpret=interpret)
    np.testing.assert_array_equal(total, wanted[0])
    with no_races() as interpret:
        same(found, by_kernel(wanted[1], rounding, interpret))


@ROUNDINGS
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_xla_rounds_a_norm_as_it_would_be_later(rounding, dtype):
    given = inputs((2, 3, 512), dtype)
    total, found = add_norm(*given, eps=EPS, rounding=rounding, implementation="xla")
    wanted = add_norm(*given, eps=EPS, implementation="xla")
    np.testing.assert_array_equal(total, wanted[0])
    same(found, rounded_rows(wanted[1], rounding))


def gate_and_up(tokens: tuple[int, ...], inner: int, parts: int):
    both = 3 * jax.random.normal(jax.random.key(0), (parts, *tokens, 2 * inner))
    return unequal(both.astype(BF16 if parts == 1 else jnp.float32))


def gated_in_float32(gate_up):
    """silu(gate) * up, rounded to bfloat16 only once. Not for `jit`, with which XLA may leave out
    that the sum of the parts is rounded."""
    whole = gate_up.astype(jnp.float32).sum(axis=0).astype(BF16).astype(jnp.float32)
    gate, up = jnp.split(whole, 2, axis=-1)
    return (gate / (1 + jnp.exp(-gate)) * up).astype(BF16)


@pytest.mark.parametrize(("rounding", "parts"), [("pieces", 2), ("rows", 1)])
def test_a_gate_is_rounded_as_it_would_be_later(rounding, parts):
    gate_up = gate_and_up((3, 5), 384, parts)
    with no_races() as interpret:
        found = gates.silu_gate(gate_up, dtype=BF16, rounding=rounding, interpret=interpret)
    with no_races() as interpret:
        same(found, by_kernel(gated_in_float32(gate_up), rounding, interpret))


@ROUNDINGS
@pytest.mark.parametrize("parts", [1, 2])
def test_xla_rounds_a_gate_as_it_would_be_later(rounding, parts):
    gate_up = gate_and_up((3, 5), 384, parts)
    gate, up = jnp.split(gate_up.sum(axis=0).astype(BF16), 2, axis=-1)
    found = silu_gate(gate_up, dtype=BF16, rounding=rounding, implementation="xla")
    same(found, rounded_rows(jax.nn.silu(gate) * up, rounding))


def test_a_long_row_of_a_gate_is_made_in_equal_shares():
    for inner in (3072, 9728, 12288, 17408, 25600, 128 * 131):
        size = gates.share_of_row(inner)
        assert inner % size == size % 128 == 0 and size <= 2048


def test_what_the_kernels_cannot_do():
    norm = functools.partial(ADD_NORM.choice, "mosaic", eps=EPS)
    with pytest.raises(NotForThisKernel, match="hidden size 640 in pieces; expected a multiple"):
        norm(*inputs((2, 640), "bfloat16"), rounding="pieces")
    assert norm(*inputs((2, 640), "bfloat16"), rounding="rows").reason is None
    with pytest.raises(NotForThisKernel, match="a norm that is rounded to 8 bits"):
        ADD_NORM.choice("portable", *inputs((2, 512), "bfloat16"), eps=EPS, rounding="rows")
    gate = functools.partial(SILU_GATE.choice, "mosaic", rounding="pieces")
    with pytest.raises(NotForThisKernel, match="activations in float32; expected bfloat16"):
        gate(jnp.zeros((1, 2, 512)), dtype=jnp.float32)
    with pytest.raises(NotForThisKernel, match="inner size 192; expected a multiple of 128"):
        gate(jnp.zeros((1, 2, 384), BF16), dtype=BF16)


def test_scales_of_another_kind_are_refused():
    x = rounded_rows(jnp.zeros((3, 256), BF16), "rows")
    with pytest.raises(NotForThisKernel, match="scales of rows of shape"):
        FP8_PRODUCT.choice("mosaic", x, *matrix(128, 256, channels=False))


@needs_compiler
@ROUNDINGS
@pytest.mark.parametrize(
    ("tokens", "hidden", "inner", "parts"),
    [(512, 4096, 12288, 1), (128, 2560, 9728, 2)],
    ids=["8B", "4B"],
)
def test_they_compile_without_spills(tokens, hidden, inner, parts, rounding, monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")

    def between_products(x, addend, scale, gate_up):
        total, normed = norms.add_norm(x, addend, scale, eps=EPS, rounding=rounding)
        return total, normed, gates.silu_gate(gate_up, dtype=BF16, rounding=rounding)

    given = jax.eval_shape(
        lambda: (*inputs((tokens, hidden), "bfloat16", 4), gate_and_up((tokens,), inner, parts))
    )
    program = compiled(jax.jit(between_products).lower(*placed(given)))
    assert_no_spills("".join(capfd.readouterr()))
    launches = [line for line in program.as_text().splitlines() if " = " in line and "(" in line]
    others = ("parameter(", "bitcast(", "get-tuple-element(", "tuple(", "mosaic_gpu")
    assert not [line for line in launches if not any(other in line for other in others)]


@pytest.mark.gpu
@ROUNDINGS
@pytest.mark.parametrize("tokens", [16, 100, 128, 512])
@pytest.mark.parametrize(("hidden", "inner"), [(4096, 12288), (2560, 9728)], ids=["8B", "4B"])
def test_on_device(tokens, hidden, inner, rounding):
    given = inputs((tokens, hidden), "bfloat16", 4)
    options = {"eps": EPS, "implementation": "mosaic"}
    norm = jax.jit(functools.partial(add_norm, **options))
    in_8_bits = jax.jit(functools.partial(add_norm, rounding=rounding, **options))
    later = jax.jit(by_kernel, static_argnums=1)
    total, found = in_8_bits(*given)
    wanted = norm(*given)
    np.testing.assert_array_equal(total, wanted[0])
    same(found, later(wanted[1], rounding))

    options = {"dtype": BF16, "rounding": rounding, "implementation": "mosaic"}
    gate_up = gate_and_up((tokens,), inner, 2)
    gated = jax.jit(functools.partial(silu_gate, **options))(gate_up)
    wanted = later(gated_in_float32(gate_up), rounding)
    # Its exponential is another one, so that some numbers are rounded the other way.
    equal = gated.numbers.astype(jnp.float32) == wanted.numbers.astype(jnp.float32)
    assert equal.mean() > 0.98
    np.testing.assert_allclose(scales_by_row(gated), scales_by_row(wanted), rtol=2**-7)
