"""The block form as it is compiled for an H100, run on the CPU (`tests/ptx`), against the formula
in float64. Pallas' interpreter knows neither layouts nor swizzles, and did not show that every
other row of the values came in another order than it was stored in."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from h100 import needs_compiler
from on_ptx import on_ptx
from test_block_form import (
    GATED,
    NEAR_FLOAT32,
    SMALL,
    agree_with_single_layers,
    agrees,
    by_reference,
    equal_keys,
    fold_with_mosaic,
    gates_agree,
    of_layers,
    to_fold,
)
from test_mixer_kernels import DIM, READ, chosen, drawn, spoilt

from pallas_kernels.gated_delta import block_mosaic

pytestmark = pytest.mark.slow
OF_4B: dict[str, Any] = {"batch": 8, "width": 16, "key_heads": 16, "value_heads": 32}


@functools.cache
def compiled_for(op, *shapes, **options):
    return on_ptx(functools.partial(op, **options), *shapes)


def on_ptx_of(op, *given: jax.Array, blocks: range | None = None, **options):
    shapes = jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype), given)
    return compiled_for(op, *shapes, **options)(*given, blocks=blocks)


def by_ptx(given: dict) -> tuple:
    read = on_ptx_of(block_mosaic.block_read, *chosen(given, READ))
    return *read, functools.partial(on_ptx_of, fold_with_mosaic)


@needs_compiler
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_the_compiled_kernels_agree_with_the_formula(case: dict):
    agrees(spoilt(drawn(**case)), by_ptx)


@needs_compiler
def test_equal_keys_that_hardly_decay():
    agrees(equal_keys(SMALL[0]["batch"], value_heads=1), by_ptx)


@needs_compiler
@pytest.mark.parametrize("case", GATED, ids=str)
def test_outputs_are_normed_and_gated(case: dict):
    def read(*given: jax.Array, eps: float) -> tuple:
        return on_ptx_of(block_mosaic.block_read, *given, eps=eps)

    gates_agree(drawn(**case), read)


def columns_of(head: int) -> slice:
    return slice(head * DIM, (head + 1) * DIM)


@needs_compiler
def test_two_heads_of_a_4b():
    """Of the second request; only the first of the heads writes the keys, which both share. What
    other thread blocks would write stays NaN."""
    given = spoilt(drawn(**OF_4B))
    heads, rows = (4, 5), int(given["counts"][1])
    first = OF_4B["value_heads"] + heads[0]
    blocks = range(first, first + len(heads))
    out, corrected = on_ptx_of(block_mosaic.block_read, *chosen(given, READ), blocks=blocks)
    expected, wanted, _ = by_reference(given)
    for head in heads:
        found, right = (np.asarray(x[1, :rows, head], np.float32) for x in (out, expected))
        np.testing.assert_allclose(found, right, rtol=2**-8, atol=2**-8)
        found, right = (
            np.asarray(x.corrections[1, :rows, columns_of(head)]) for x in (corrected, wanted)
        )
        np.testing.assert_allclose(found, right, rtol=NEAR_FLOAT32, atol=NEAR_FLOAT32)
    keys, right = (np.asarray(x.keys[1, :rows], np.float32) for x in (corrected, wanted))
    mine = columns_of(heads[0] // 2)
    np.testing.assert_array_equal(keys[:, mine], right[:, mine])
    assert np.isnan(np.delete(keys, np.arange(keys.shape[1])[mine], axis=1)).all()
    assert np.isnan(np.delete(np.asarray(out, np.float32)[1], heads, axis=1)).all()
    assert np.isnan(np.asarray(out, np.float32)[0]).all()


@needs_compiler
def test_one_head_of_a_4b_is_folded_in():
    given = drawn(**OF_4B)
    _, corrected, fold = by_reference(given)
    arguments, head = to_fold(given, corrected), 7
    blocks = range(2 * head, 2 * head + 2)
    (after, tails), (wanted, last) = (
        on_ptx_of(fold_with_mosaic, *arguments, blocks=blocks),
        fold(*arguments),
    )
    slot, values = int(given["slots"][0]), columns_of(32 + head)
    np.testing.assert_allclose(after[slot, head], wanted[slot, head], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(after[slot, head + 1], given["state"][slot, head + 1])
    np.testing.assert_array_equal(tails[slot, :, values], last[slot, :, values])


@needs_compiler
def test_two_layers_are_folded_at_once():
    layers, of_requests = of_layers(2, batch=2, width=9, value_heads=1)
    fold = lambda layers, *others: on_ptx_of(block_mosaic.block_folds, layers, *others)
    agree_with_single_layers(layers, of_requests, fold)
