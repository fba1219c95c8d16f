"""A product in parts is the product, and how many parts there are follows a written rule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import split_product
from pallas_kernels.split_product import parts_of

ALL_PARTS = [(16, 512, 64, 4), (16, 256, 64, 2), (16, 384, 64, 1), (1, 512, 64, 1)]


@pytest.mark.parametrize(("tokens", "inputs", "outputs", "parts"), ALL_PARTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_parts_add_up_to_the_product(tokens, inputs, outputs, parts, dtype):
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], (1, tokens, inputs), dtype)
    matrix = jax.random.normal(keys[1], (inputs, outputs), dtype)
    found = split_product(x, matrix, implementation="mosaic")
    assert found.shape == (parts, 1, tokens, outputs)
    assert found.dtype == (jnp.float32 if parts > 1 else dtype)
    wanted = np.asarray(x[0], np.float64) @ np.asarray(matrix, np.float64)
    rounding = 2e-2 if parts == 1 and dtype == "bfloat16" else 1e-5
    np.testing.assert_allclose(
        np.asarray(found, np.float64).sum(axis=0)[0], wanted, rtol=rounding, atol=50 * rounding
    )


@pytest.mark.parametrize(("tokens", "inputs", "outputs", "parts"), ALL_PARTS)
def test_each_part_has_its_own_inputs(tokens, inputs, outputs, parts):
    """Part p is the product of the p-th share of the inputs alone."""
    matrix = jax.random.normal(jax.random.key(1), (inputs, outputs))
    for part in range(parts):
        share = slice(part * inputs // parts, (part + 1) * inputs // parts)
        x = jnp.zeros((tokens, inputs)).at[:, share].set(1.0)
        found = split_product(x, matrix, implementation="mosaic")
        np.testing.assert_allclose(found[part][0], matrix[share].sum(0), rtol=1e-4, atol=1e-4)
        assert not np.delete(np.asarray(found), part, axis=0).any()


def test_without_kernels_there_is_one_part():
    ones = jnp.ones((16, 512))
    for implementation in ("xla", "auto"):
        assert split_product(ones, jnp.ones((512, 64)), implementation=implementation).shape[0] == 1


@pytest.mark.parametrize(
    ("tokens", "inputs", "outputs", "parts"),
    [
        # One token, or more than 128: never.
        (1, 4096, 4096, 1),
        (129, 4096, 4096, 1),
        (2, 4096, 4096, 4),
        # Up to 32 tokens: 384 blocks of 64 columns at once.
        (32, 4096, 96 * 64, 4),
        (32, 4096, 96 * 64 + 1, 2),
        (32, 4096, 192 * 64, 2),
        (32, 4096, 192 * 64 + 1, 1),
        # More tokens: 132 blocks of 128 columns at once.
        (33, 4096, 33 * 128, 4),
        (33, 4096, 33 * 128 + 1, 2),
        (128, 4096, 66 * 128, 2),
        (128, 4096, 66 * 128 + 1, 1),
        # Every part has a multiple of 128 inputs.
        (16, 512, 64, 4),
        (16, 768, 64, 2),
        (16, 640, 64, 1),
    ],
)
def test_the_number_of_parts(tokens, inputs, outputs, parts):
    assert parts_of(tokens, inputs, outputs) == parts
