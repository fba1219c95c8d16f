"""The convolutions against their formula in double precision, and where blocks begin."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.layers.axes import Axis
from jaxspec.layers.convolution import Convolution, Convolutions, convolve
from jaxspec.layers.decoder import BlockMask, Decoder
from jaxspec.layers.rope import Rope
from jaxspec.models.config import DFlashConfig, Selector
from jaxspec.models.dflash import DFlash
from jaxspec.models.parameters import parameter_axes, parameter_shapes, random_params

HIDDEN, WIDTH, BATCH = 32, 6, 3
GROUPS = {2: 16, 3: 8, 1: 32}
"""Group sizes by taps."""


@pytest.fixture
def double_precision():
    with jax.enable_x64(True):
        yield


def by_hand(y, base, changes, group_size):
    """One output number at a time. y: [width, hidden], changes: [width, taps, groups]."""
    out = np.zeros_like(y)
    for i in range(y.shape[0]):
        for c in range(y.shape[1]):
            for tap in range(base.shape[0]):
                if i - tap >= 0:
                    kernel = base[tap, c] + changes[i, tap, c // group_size]
                    out[i, c] += kernel * y[i - tap, c]
    return out


def drawn(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape)


@pytest.mark.parametrize("taps", GROUPS)
@pytest.mark.parametrize("width", [1, 2, WIDTH])
def test_the_formula(taps, width, double_precision):
    group_size = GROUPS[taps]
    y, base = drawn(BATCH, width, HIDDEN), drawn(taps, HIDDEN)
    changes = drawn(BATCH, width, taps, HIDDEN // group_size)
    found = convolve(*map(jnp.asarray, (y, base, changes)))
    expected = [by_hand(*one, group_size) for one in zip(y, [base] * BATCH, changes)]
    assert found.dtype == jnp.float64
    np.testing.assert_allclose(found, expected, rtol=1e-13, atol=1e-13)


def test_both_sides_and_the_sublayer_between_them(double_precision):
    """The changes come from the input before the first convolution, for both sides."""
    taps, group_size = 2, 16
    module = Convolution(Convolutions(taps, group_size), Axis("hidden", HIDDEN), jnp.float64)
    x, sublayer = drawn(BATCH, WIDTH, HIDDEN), drawn(HIDDEN, HIDDEN)
    base, projection = drawn(2, taps, HIDDEN), drawn(HIDDEN, 2 * taps * HIDDEN // group_size)
    params = {"base": jnp.asarray(base), "projection": {"kernel": jnp.asarray(projection)}}

    def around(convolution, x):
        before, after = convolution(x, lambda tokens: tokens)
        return after(before @ sublayer)

    found = module.apply({"params": params}, jnp.asarray(x), method=around)
    for request in range(BATCH):
        changes = (x[request] @ projection).reshape(WIDTH, 2, taps, HIDDEN // group_size)
        inner = by_hand(x[request], base[0], changes[:, 0], group_size) @ sublayer
        expected = by_hand(inner, base[1], changes[:, 1], group_size)
        np.testing.assert_allclose(found[request], expected, rtol=1e-11, atol=1e-11)


def test_blocks_side_by_side_do_not_see_each_other(double_precision):
    sizes = Convolutions(2, 16)
    module = Convolution(sizes, Axis("hidden", HIDDEN), jnp.float64)
    params = module.init(jax.random.key(0), jnp.zeros((1, 1, HIDDEN)), lambda x: x)["params"]
    params = jax.tree.map(lambda x: jnp.asarray(drawn(*x.shape)), params)
    x = jnp.asarray(drawn(BATCH, 4 * WIDTH, HIDDEN))
    apply = lambda x, by_block: module.apply({"params": params}, x, by_block)[0]
    side_by_side = apply(x, lambda y: y.reshape(BATCH, 4, WIDTH, -1))
    for block in range(4):
        own = x[:, block * WIDTH : (block + 1) * WIDTH]
        alone = apply(own, lambda y: y)
        np.testing.assert_array_equal(side_by_side[:, block * WIDTH : (block + 1) * WIDTH], alone)
    assert not np.array_equal(side_by_side, apply(x, lambda y: y)), "the border has to matter"


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_fresh_kernels_leave_every_bit(dtype):
    module = Convolution(Convolutions(2, 16), Axis("hidden", HIDDEN), jnp.dtype(dtype))
    y = jnp.asarray(drawn(BATCH, WIDTH, HIDDEN), dtype)
    fresh = random_base(module, dtype)
    found = convolve(y, fresh[0], jnp.zeros((BATCH, WIDTH, 2, HIDDEN // 16), dtype))
    assert found.dtype == dtype and found.tobytes() == y.tobytes()


def random_base(module, dtype):
    x = jnp.zeros((1, 1, HIDDEN), dtype)
    return module.init(jax.random.key(0), x, lambda x: x)["params"]["base"].unbox()


DECODER = Decoder(HIDDEN, 64, 2, 2, 1, 16, 1e-6, Rope(1e6), 128)
PLAIN = DFlashConfig(DECODER, WIDTH, 3, (0,), 50, (BlockMask(False),) * 2)
WHOLE = dataclasses.replace(
    PLAIN, convolutions=Convolutions(2, 16), transition=Selector(rank=8, candidates=4)
)


def test_a_plain_drafter_has_none_of_it():
    added = parameter_shapes(DFlash(WHOLE)).keys() - parameter_shapes(DFlash(PLAIN)).keys()
    expected = {
        f"layers_{i}/{sublayer}_convolution/{path}"
        for i in (0, 1)
        for sublayer in ("attention", "mlp")
        for path in ("base", "projection/kernel")
    }
    expected |= {
        f"transition/{name}"
        for name in ("preceding/embedding", "following/embedding", "projection/kernel")
    }
    assert added == expected
    axes = parameter_axes(DFlash(WHOLE))
    sides, taps, hidden = axes["layers_0/mlp_convolution/base"]
    assert (sides.size, taps.size, hidden.size) == (2, 2, HIDDEN)
    assert random_params(DFlash(WHOLE), jax.random.key(0)).keys() >= {"transition"}
