"""Every implementation of qkv_write against a float64 oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreter import no_races
from write_cases import EPS, Case, expected, inputs

from pallas_kernels import NotForThisKernel, qkv_write
from pallas_kernels.qkv_write import mosaic

ROUNDING = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 2e-6}
"""Of one number, relative to it (and absolute below one)."""

SMALL = [
    Case(),
    Case(kv_heads=8, group=0, slots=1, width=2),
    Case(group=5, slots=1, width=2),
    Case(kv_heads=3, group=1, slots=1, width=2, page_size=32),
    Case(kv_heads=8, head_dim=128, slots=1, width=2),
    Case(kv_heads=2, group=2, head_dim=128, slots=3, width=1, dtype="float32"),
    Case(kv_heads=2, group=2, head_dim=128, slots=1, width=2, dtype="float32", parts=4),
    Case(kv_heads=4, slots=1, width=2, head_dim=256, scale_dtype="float32"),
    Case(kv_heads=4, group=6, slots=1, width=2, head_dim=256, page_size=64),
]
LARGE = [
    Case(slots=slots, width=width, kv_heads=8, group=group, head_dim=128)
    for slots, width, group in ((1, 1, 4), (8, 16, 4), (32, 16, 2), (2, 512, 4), (8, 16, 0))
]


def agrees(case: Case, write) -> None:
    given = inputs(case)
    for out, wanted in zip(write(given), expected(case, given)):
        assert out.shape == wanted.shape
        out = np.asarray(out, np.float64)
        within = ROUNDING[case.dtype] * np.maximum(1, np.abs(wanted))
        assert (np.abs(out - wanted) <= within).all()


def write(given: dict, implementation: str):
    return jax.jit(functools.partial(qkv_write, eps=EPS, implementation=implementation))(**given)


def interpreted(given: dict):
    with no_races() as interpret:
        return jax.block_until_ready(mosaic.qkv_write(**given, eps=EPS, interpret=interpret))


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
class TestOnCpu:
    def test_reference(self, case: Case):
        agrees(case, lambda given: write(given, "xla"))

    def test_interpreted(self, case: Case):
        agrees(case, interpreted)


@pytest.mark.gpu
@pytest.mark.parametrize("case", SMALL + LARGE, ids=lambda case: case.name)
def test_on_device(case: Case):
    agrees(case, lambda given: write(given, "mosaic"))


@pytest.mark.gpu
def test_rows_do_not_change_with_their_neighbours():
    case = Case(slots=4, width=4, kv_heads=8, head_dim=128)
    given = inputs(case)
    by_slot = ("cos", "sin", "cells")
    turned_around = {
        name: x[:, ::-1] if name == "qkv" else x[::-1] if name in by_slot else x
        for name, x in given.items()
    }
    query, keys, values = write(given, "mosaic")
    again, same_keys, same_values = write(turned_around, "mosaic")
    np.testing.assert_array_equal(query.astype(jnp.float32), again[::-1].astype(jnp.float32))
    np.testing.assert_array_equal(keys.astype(jnp.float32), same_keys.astype(jnp.float32))
    np.testing.assert_array_equal(values.astype(jnp.float32), same_values.astype(jnp.float32))


def test_rows_that_are_not_kept_may_share_the_trash_page():
    case = Case(slots=2, width=2)
    given = inputs(case)
    rows = given["cells"].at[1].set(0)
    query, keys, _ = write({**given, "cells": rows}, "xla")
    kept = rows[0]
    flat = lambda pages: pages.reshape(-1, *pages.shape[2:])
    _, all_keys, _ = write(given, "xla")
    np.testing.assert_array_equal(flat(keys)[kept], flat(all_keys)[kept])
    untouched = np.setdiff1d(np.arange(case.page_size, len(flat(keys))), np.asarray(kept))
    np.testing.assert_array_equal(flat(keys)[untouched], flat(given["key_pages"])[untouched])


@pytest.mark.parametrize(
    "case",
    [Case(head_dim=48), Case(kv_heads=1, group=2)],
    ids=["head_dim 48", "four heads in a row"],
)
def test_the_kernel_says_no(case: Case):
    with pytest.raises(NotForThisKernel, match="expected"):
        write(inputs(case), "mosaic")
