"""Every implementation of add_norm against a float64 oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h100 import assert_no_spills, compiled, needs_compiler, placed
from interpreter import no_races

from pallas_kernels import NotForThisKernel, add_norm
from pallas_kernels.add_norm import mosaic

EPS = 1e-6
CASES = [((2, 3, 384), "bfloat16", 1), ((1, 256), "float32", 3), ((5, 1280), "bfloat16", 2)]
LARGE = [
    ((1, 1, 4096), "bfloat16", 4),
    ((32, 16, 2560), "bfloat16", 4),
    ((8, 512, 5120), "bfloat16", 1),
]
ROUNDING = {"bfloat16": 2**-8, "float32": 1e-6}


def inputs(shape: tuple[int, ...], dtype: str, parts: int = 1):
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], shape, dtype)
    addend = jax.random.normal(keys[1], (parts, *shape), dtype if parts == 1 else jnp.float32)
    return x, addend, jax.random.normal(keys[2], shape[-1:], dtype)


def agrees(given, outputs) -> None:
    x, addend, scale = (np.asarray(array, np.float64) for array in given)
    addend = addend.sum(0)
    total, normed = (np.asarray(array, np.float64) for array in outputs)
    rounding = ROUNDING[str(given[0].dtype)]
    assert (np.abs(total - (x + addend)) <= rounding * (np.abs(x) + 2 * np.abs(addend))).all()
    wanted = total / np.sqrt((total * total).mean(-1, keepdims=True) + EPS) * scale
    assert (np.abs(normed - wanted) <= 2 * rounding * np.abs(wanted)).all()


def run(given, implementation: str):
    return jax.jit(functools.partial(add_norm, eps=EPS, implementation=implementation))(*given)


@pytest.mark.parametrize(("shape", "dtype", "parts"), CASES)
class TestOnCpu:
    def test_reference(self, shape, dtype, parts):
        given = inputs(shape, dtype, parts)
        agrees(given, run(given, "xla"))

    def test_interpreted(self, shape, dtype, parts):
        given = inputs(shape, dtype, parts)
        with no_races() as interpret:
            agrees(given, mosaic.add_norm(*given, eps=EPS, interpret=interpret))


def run_reference(given):
    return run(given, "xla")


def run_interpreted(given):
    with no_races() as interpret:
        return mosaic.add_norm(*given, eps=EPS, interpret=interpret)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("run_it", [run_reference, run_interpreted])
def test_the_sum_of_the_parts_is_rounded_before_it_is_added(run_it, parts):
    """As the unsplit product would be: 1 + (2^-8 + 2^-18) would round up, 1 + 2^-8 is a tie, which
    goes to the even 1."""
    x, scale = jnp.ones((2, 128), jnp.bfloat16), jnp.ones((128,), jnp.bfloat16)
    pieces = [2.0**-8, 2.0**-18] if parts == 2 else [2.0**-8 + 2.0**-18]
    addend = jnp.stack([jnp.full((2, 128), piece, jnp.float32) for piece in pieces])
    total, _ = run_it((x, addend, scale))
    np.testing.assert_array_equal(np.asarray(total, np.float32), 1.0)


@pytest.mark.parametrize("run_it", [run_reference, run_interpreted])
def test_a_scale_may_be_float32(run_it):
    x, addend, scale = inputs((3, 384), "bfloat16")
    wide = scale.astype(jnp.float32) * (1 + 2.0**-12)
    agrees((x, addend, wide), run_it((x, addend, wide)))


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "dtype", "parts"), CASES + LARGE)
def test_on_device(shape, dtype, parts):
    given = inputs(shape, dtype, parts)
    agrees(given, run(given, "mosaic"))


@pytest.mark.gpu
def test_a_row_does_not_depend_on_its_neighbours():
    x, addend, scale = inputs((16, 4096), "bfloat16", 4)
    alone = run((x[3:4], addend[:, 3:4], scale), "mosaic")
    together = run((x, addend, scale), "mosaic")
    for one, all_of_them in zip(alone, together):
        np.testing.assert_array_equal(
            one[0].astype(jnp.float32), all_of_them[3].astype(jnp.float32)
        )


def test_the_kernel_says_no():
    with pytest.raises(NotForThisKernel, match="multiple of 128"):
        run(inputs((2, 96), "float32"), "mosaic")


@needs_compiler
@pytest.mark.parametrize("scale_dtype", [jnp.bfloat16, jnp.float32])
def test_it_compiles_without_spills(scale_dtype, monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    x, addend, scale = jax.eval_shape(lambda: inputs((16, 4096), "bfloat16", 4))
    given = x, addend, jax.ShapeDtypeStruct(scale.shape, scale_dtype)
    compiled(jax.jit(functools.partial(mosaic.add_norm, eps=EPS)).lower(*placed(given)))
    assert_no_spills("".join(capfd.readouterr()))
