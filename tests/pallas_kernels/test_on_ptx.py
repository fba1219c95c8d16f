"""Kernels that a GPU has run right, run as they are compiled for an H100 on the CPU: what the
interpreter of PTX (`tests/ptx`) is trusted by."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h100 import needs_compiler
from on_ptx import on_ptx
from test_mixer_kernels import FOLD, READ, chosen, drawn, folds_agree, reads_agree, spoilt

from pallas_kernels.add_norm import mosaic as add_norm
from pallas_kernels.add_norm import reference
from pallas_kernels.gated_delta import mosaic

BF16 = jnp.bfloat16


def on_ptx_of(op, *given):
    return on_ptx(op, *(jax.ShapeDtypeStruct(one.shape, one.dtype) for one in given))(*given)


@needs_compiler
def test_add_norm():
    draw = np.random.default_rng(0)
    rows = [jnp.asarray(draw.normal(size=size), BF16) for size in ((3, 256), (2, 3, 256))]
    scale = jnp.asarray(draw.normal(size=256), BF16)
    found = on_ptx_of(functools.partial(add_norm.add_norm, eps=1e-6), *rows, scale)
    expected = reference.add_norm(*rows, scale, eps=1e-6)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(
            np.asarray(one, np.float32), np.asarray(other, np.float32), rtol=2**-7, atol=2**-7
        )


@needs_compiler
@pytest.mark.slow
def test_mixer_read():
    reads_agree(
        spoilt(drawn()),
        lambda given: jnp.asarray(on_ptx_of(mosaic.mixer_read, *chosen(given, READ))),
    )


@needs_compiler
@pytest.mark.slow
def test_mixer_fold():
    folds_agree(spoilt(drawn()), lambda given: on_ptx_of(mosaic.mixer_fold, *chosen(given, FOLD)))
