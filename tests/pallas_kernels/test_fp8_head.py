"""The product with a head of Qwen3 in 8 bits, with which a drafter chooses its drafts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h100 import assert_no_spills, compiled, needs_compiler, placed
from test_fp8_product import inputs_of, matrix, relative_error, shapes
from test_fp8_product_8_by_8 import products_in_float32
from test_fp8_product_8_by_8 import relative_error as error_of

from pallas_kernels import fp8_product
from pallas_kernels.fp8_product import BLOCK, mosaic
from pallas_kernels.fp8_product.plan import MULTIPROCESSORS, Split
from pallas_kernels.fp8_product.plan_of import plan_of

VOCABULARY = 151936
TILES = 1187
"""VOCABULARY / 128, which is a prime number: no wider tile divides it."""
HIDDEN = {"8B": 4096, "4B": 2560}
ROWS = [(16, False), (60, False), (120, False)]
ROWS += [(16, True), (60, True), (120, True), (240, True), (480, True)]
"""Drafted places of all requests of a step, and whether they are rounded to 8 bits."""


@pytest.mark.parametrize("model", HIDDEN)
@pytest.mark.parametrize(("tokens", "quantised"), ROWS)
def test_every_thread_block_reads_all_inputs(tokens, quantised, model):
    """There are enough tiles for all multiprocessors, so no sum is in parts."""
    made = plan_of(*shapes(tokens, VOCABULARY, HIDDEN[model]), quantise_inputs=quantised)
    assert made.split == Split(tile=128, parts=1)
    assert (made.tiles, made.steps * BLOCK) == (TILES, HIDDEN[model])
    at_once = 2 * MULTIPROCESSORS if tokens <= 64 else MULTIPROCESSORS
    rounds = TILES * made.row_tiles / at_once
    assert rounds / np.ceil(rounds) > 0.89, "the share of multiprocessors that work"
    assert made.stages >= 3


@needs_compiler
@pytest.mark.parametrize("model", HIDDEN)
@pytest.mark.parametrize(("tokens", "quantised"), ROWS)
def test_it_compiles_without_spills(tokens, quantised, model, monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    given = shapes(tokens, VOCABULARY, HIDDEN[model])
    product = functools.partial(mosaic.fp8_product, quantise_inputs=quantised)
    program = compiled(jax.jit(product).lower(*placed(given)))
    output = "".join(capfd.readouterr())
    assert_no_spills(output)
    assert "'setmaxnreg' ignored" not in output
    made = plan_of(*given, quantise_inputs=quantised)
    with_padding = 0 if made.padded == tokens else 2 * made.padded * VOCABULARY
    assert program.memory_analysis().temp_size_in_bytes < with_padding + 5e6


@pytest.mark.gpu
@pytest.mark.parametrize("model", HIDDEN)
@pytest.mark.parametrize(("tokens", "quantised"), ROWS)
def test_on_device(tokens, quantised, model):
    """Compared at the first tiles, at the last ones and at some between them."""
    numbers, scales = matrix(VOCABULARY, HIDDEN[model], channels=False)
    x = inputs_of((tokens,), HIDDEN[model])
    options = {"quantise_inputs": quantised, "implementation": "mosaic"}
    found = jax.jit(functools.partial(fp8_product, **options))(x, numbers, scales)
    tiles = np.array([0, 1, 131, 132, 264, 593, 1055, 1185, 1186])
    outputs = (tiles[:, None] * BLOCK + np.arange(BLOCK)).ravel()
    some, of_some = found[:, outputs], (numbers[outputs], scales[tiles])
    if quantised:
        assert error_of(some, products_in_float32(x, *of_some)) < 3e-3
    else:
        assert relative_error(some, x, *of_some) < 3e-3
    assert jnp.isfinite(found).all()
