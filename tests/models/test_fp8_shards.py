"""Products with 8-bit matrices that are cut over devices, here those of `vmap`: beside each other
where outputs are cut, added up where inputs are, rounded inputs among them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.layers.axes import Axis, shard_of
from jaxspec.layers.fp8 import Fp8, Fp8Linear
from jaxspec.layers.shards import AXIS, Shards
from pallas_kernels.fp8_product import E4M3, fp8_product

INPUTS, OUTPUTS, DEVICES = Axis("inner", 512), Axis("hidden", 256), 4


@functools.cache
def operands(blocks: bool) -> tuple:
    """Rows whose largest number is in another device's part each, and a matrix."""
    keys = jax.random.split(jax.random.key(0), 3)
    rows = jax.random.normal(keys[0], (5, INPUTS.size))
    rows = rows.at[jnp.arange(4), jnp.arange(4) * 128 + 7].set(30.0).at[4].set(0.0)
    weight = (40 * jax.random.normal(keys[1], (OUTPUTS.size, INPUTS.size))).astype(E4M3)
    scaled = (OUTPUTS.size // 128, INPUTS.size // 128) if blocks else (OUTPUTS.size, 1)
    return rows, weight, jnp.exp2(jax.random.randint(keys[2], scaled, -9, -5).astype(jnp.float32))


def cut(array: jax.Array, axes: tuple, name: str) -> jax.Array:
    parts = [shard_of(array, axes, (name,), i, DEVICES) for i in range(DEVICES)]
    return jnp.stack(parts)


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("blocks", [False, True])
def test_inputs_that_are_cut(blocks, quantised, in_order):
    rows, weight, scales = operands(blocks)
    fp8 = Fp8(blocks, quantised)
    of_scales = fp8.scaled(OUTPUTS), fp8.pieces(INPUTS)
    params = {
        "weight": cut(weight, (OUTPUTS, INPUTS), "inner"),
        "scales": cut(scales, of_scales, "inner"),
    }
    parts = cut(rows, (Axis("tokens", 5), INPUTS), "inner")
    layer = Fp8Linear(INPUTS.cut(Shards(DEVICES, in_order)), OUTPUTS, fp8)
    apply = lambda params, x: layer.apply({"params": params}, x)
    found = jax.vmap(apply, axis_name=AXIS)(params, parts)
    expected = fp8_product(rows, weight, scales, quantise_inputs=quantised)
    for of_device in found:
        np.testing.assert_allclose(of_device, expected, rtol=1e-5, atol=1e-5)
    assert fp8.rounds_before(layer.inputs) == (quantised and not blocks)
    assert not fp8.rounds_before(INPUTS)
    if quantised:  # not what each device's own largest numbers give, if rows have one scale
        alone = sum(
            fp8_product(x, *part, quantise_inputs=True)
            for x, *part in zip(parts, params["weight"], params["scales"], strict=True)
        )
        assert (abs(alone - expected).max() > 1e-2) == (not blocks)


def test_rounded_rows_in_bfloat16():
    """Rounded numbers are bfloat16 too, so only the partial sums are rounded more."""
    rows, weight, scales = operands(blocks=False)
    rows = rows.astype(jnp.bfloat16)
    layer = Fp8Linear(INPUTS.cut(Shards(DEVICES)), OUTPUTS, Fp8(False, True))
    params = {"weight": cut(weight, (OUTPUTS, INPUTS), "inner"), "scales": scales}
    apply = lambda weight, x: layer.apply({"params": params | {"weight": weight}}, x)
    parts = cut(rows, (Axis("tokens", 5), INPUTS), "inner")
    found = jax.vmap(apply, axis_name=AXIS)(params["weight"], parts)
    wide = rows.astype(jnp.float32)
    expected = fp8_product(wide, weight, scales, quantise_inputs=True)
    assert found.dtype == jnp.bfloat16
    off = abs(found[0].astype(jnp.float32) - expected).max()
    assert off <= 4 * 2**-8 * abs(expected).max()


@pytest.mark.parametrize("blocks", [False, True])
def test_axes_of_scales_are_cut_as_those_of_the_numbers(blocks):
    fp8, shards = Fp8(blocks), Shards(2)
    heads = Axis("heads", 1024, unit=64).cut(shards)
    outputs = fp8.scaled(heads)
    assert outputs.shards == shards and outputs.size == (4 if blocks else 512)
    assert fp8.pieces(heads).shards == (shards if blocks else Shards())
    assert fp8.pieces(heads).size == (4 if blocks else 1)
