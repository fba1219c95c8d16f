"""The kernels that make their rows of a layer's projection, against their references."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h100 import assert_no_spills, compiled, needs_compiler, placed
from interpreter import no_races

import pallas_kernels
from pallas_kernels import NotForThisKernel
from pallas_kernels.gated_delta import mosaic, reference

DIM, TAPS = 128, 4
NEAR = {"bfloat16": 2**-7, "float32": 4e-6}
READ = ("inputs", "tails", "taps", "decay_bias", "log_rate", "state", "slots", "lengths")
FOLD = (*READ, "counts")
PADDING = 2
"""The slot of requests that are only padding."""


def drawn(batch=2, width=3, key_heads=1, value_heads=2, dtype="bfloat16", seed=0) -> dict:
    """The first request goes on with a text, the second begins one, the others are padding. What
    nobody may read is NaN: states and tails of slots where a text begins, and of others."""
    draw = np.random.default_rng(seed)
    normal = lambda *shape: draw.normal(size=shape)
    channels = (2 * key_heads + value_heads) * DIM
    state, tails = normal(5, value_heads, DIM, DIM), normal(5, TAPS - 1, channels)
    state[[0, 1, 3]], tails[[0, 1, 3]] = np.nan, np.nan
    return {
        "inputs": jnp.asarray(normal(batch, width, channels + value_heads * (DIM + 2)), dtype),
        "tails": jnp.asarray(tails, dtype),
        "taps": jnp.asarray(normal(TAPS, channels), dtype),
        "decay_bias": jnp.asarray(normal(value_heads), jnp.float32),
        "log_rate": jnp.asarray(normal(value_heads), jnp.float32),
        "state": jnp.asarray(state, jnp.float32),
        "slots": jnp.asarray([4, 0, *[PADDING] * (batch - 2)][:batch], jnp.int32),
        "lengths": jnp.asarray([7, 0, *[0] * (batch - 2)][:batch], jnp.int32),
        "counts": jnp.asarray([width, width - 1, *[0] * (batch - 2)][:batch], jnp.int32),
    }


def spoilt(given: dict) -> dict:
    """With NaN in the rows beyond the counts, and in the gates, which nobody may read."""
    inputs, heads = given["inputs"], given["decay_bias"].size
    beyond = jnp.arange(inputs.shape[1]) >= given["counts"][:, None]
    end = inputs.shape[2] - 2 * heads
    inputs = inputs.at[..., end - heads * DIM : end].set(jnp.nan)
    return given | {"inputs": jnp.where(beyond[..., None], jnp.nan, inputs)}


def chosen(given: dict, names) -> list:
    return [given[name] for name in names]


def kept(given: dict, outputs) -> np.ndarray:
    outputs = np.asarray(outputs, np.float32)
    return np.concatenate(
        [rows[:count].ravel() for rows, count in zip(outputs, np.asarray(given["counts"]))]
    )


def read(given: dict) -> jax.Array:
    with no_races() as interpret:
        return jax.block_until_ready(mosaic.mixer_read(*chosen(given, READ), interpret=interpret))


def fold(given: dict) -> jax.Array:
    with no_races() as interpret:
        return jax.block_until_ready(mosaic.mixer_fold(*chosen(given, FOLD), interpret=interpret))


def on_device(op, names):
    return lambda given: jax.jit(functools.partial(op, implementation="mosaic"))(
        **{name: given[name] for name in names}
    )


read_on_device = on_device(pallas_kernels.mixer_read, READ)
fold_on_device = on_device(pallas_kernels.mixer_fold, FOLD)


def reads_agree(given: dict, run) -> None:
    out, expected = run(given), reference.mixer_read(*chosen(given, READ))
    assert out.shape == expected.shape and out.dtype == expected.dtype == given["inputs"].dtype
    assert np.isfinite(kept(given, expected)).all()
    near = NEAR[str(out.dtype)]
    np.testing.assert_allclose(kept(given, out), kept(given, expected), rtol=near, atol=near)


def folds_agree(given: dict, run) -> None:
    """NaN stays where nobody writes."""
    out, expected = run(given), reference.mixer_fold(*chosen(given, FOLD))
    near = NEAR[str(given["inputs"].dtype)]
    np.testing.assert_allclose(out, expected, rtol=near, atol=near)


SMALL = [
    {},
    {"width": 1, "key_heads": 2, "value_heads": 4},
    {"batch": 4, "width": 2, "key_heads": 1, "value_heads": 3, "dtype": "float32"},
    {"batch": 1, "width": 17, "dtype": "float32"},
]
LARGE = [
    {"batch": batch, "width": width, "key_heads": 16, "value_heads": heads, "dtype": dtype}
    for dtype in ("bfloat16", "float32")
    for batch, width, heads in ((1, 1, 32), (8, 16, 32), (3, 16, 48), (2, 64, 48))
]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_rows_are_read(case: dict):
    reads_agree(spoilt(drawn(**case)), read)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_rows_are_folded_in(case: dict):
    folds_agree(spoilt(drawn(**case)), fold)


@pytest.mark.parametrize("counts", [(0, 16), (5, 1), (9, 11)])
def test_any_number_of_rows_is_folded_in(counts: tuple[int, int]):
    given = drawn(width=16, value_heads=1, dtype="float32")
    folds_agree(spoilt(given | {"counts": jnp.asarray(counts, jnp.int32)}), fold)


def test_decays_and_betas_of_any_size():
    """Decays that keep nearly everything or nearly nothing, and betas near 0 and 1."""
    given = drawn(batch=1, width=8, value_heads=1, dtype="float32")
    sizes = jnp.asarray([-90.0, -20, -8, -1, 1, 8, 20, 90])
    given["inputs"] = given["inputs"].at[0, :, -1].set(sizes).at[0, :, -2].set(sizes[::-1])
    given["log_rate"] = jnp.full(1, -2.0)
    reads_agree(given, read)
    folds_agree(given, fold)


def test_padding_that_shares_a_slot_leaves_it_as_it_is():
    given = spoilt(drawn(batch=4, width=2))
    np.testing.assert_array_equal(fold(given)[PADDING], given["state"][PADDING])


def after(tails: jax.Array, given: dict, size: int) -> jax.Array:
    """The tails behind the first rows of a block."""
    channels, slots = tails.shape[2], given["slots"]
    before = jnp.where(given["lengths"][:, None, None] > 0, tails[slots], 0)
    seen = jnp.concatenate([before, given["inputs"][:, :size, :channels]], axis=1)
    return tails.at[slots].set(seen[:, size:])


def bits_do_not_depend_on_the_cut(read, fold, **case) -> None:
    """A block at once, or in pieces that are folded in one after the other."""
    given = drawn(width=7, **case)
    given = given | {"counts": jnp.full_like(given["counts"], 7)}
    whole, outputs = fold(given), read(given)
    start, state, tails = 0, given["state"], given["tails"]
    for size in (1, 4, 2):
        piece = given | {"inputs": given["inputs"][:, start : start + size + 1]}
        piece |= {"state": state, "tails": tails, "lengths": given["lengths"] + start}
        piece |= {"counts": jnp.full_like(given["counts"], size)}
        np.testing.assert_array_equal(
            np.asarray(read(piece)[:, :size], np.float32),
            np.asarray(outputs[:, start : start + size], np.float32),
        )
        state, tails, start = fold(piece), after(tails, piece, size), start + size
    np.testing.assert_array_equal(state, whole)


def test_the_bits_do_not_depend_on_the_cut():
    """With rows in bfloat16, as models have them; on a GPU with float32 as well."""
    bits_do_not_depend_on_the_cut(read, fold, value_heads=1, dtype="bfloat16")


@pytest.mark.gpu
class TestOnDevice:
    @pytest.mark.parametrize("case", SMALL + LARGE, ids=str)
    def test_rows_are_read(self, case: dict):
        reads_agree(spoilt(drawn(**case)), read_on_device)

    @pytest.mark.parametrize("case", SMALL + LARGE, ids=str)
    def test_rows_are_folded_in(self, case: dict):
        folds_agree(spoilt(drawn(**case)), fold_on_device)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    def test_the_bits_do_not_depend_on_the_cut(self, dtype: str):
        case = {"key_heads": 16, "value_heads": 32, "dtype": dtype}
        bits_do_not_depend_on_the_cut(read_on_device, fold_on_device, **case)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"width": 65}, "65 rows in a block; expected at most 64"),
        ({"key_heads": 2, "value_heads": 3}, "3 value heads and 2 key heads"),
    ],
)
def test_the_kernels_say_no(changed: dict, said: str):
    given = drawn(**changed)
    for op, names in ((pallas_kernels.mixer_read, READ), (pallas_kernels.mixer_fold, FOLD)):
        with pytest.raises(NotForThisKernel, match=said):
            op(**{name: given[name] for name in names}, implementation="mosaic")


@needs_compiler
@pytest.mark.parametrize(("batch", "width", "value_heads"), [(8, 16, 32), (1, 1, 48), (2, 64, 48)])
def test_they_compile_without_spills_and_fold_in_place(
    batch: int, width: int, value_heads: int, monkeypatch, capfd
):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    case = {"batch": batch, "width": width, "key_heads": 16, "value_heads": value_heads}
    shapes = placed(jax.eval_shape(lambda: drawn(**case)))
    compiled(jax.jit(mosaic.mixer_read).lower(*chosen(shapes, READ)))
    folding = jax.jit(mosaic.mixer_fold, donate_argnums=FOLD.index("state"))
    program = compiled(folding.lower(*chosen(shapes, FOLD)))
    assert_no_spills("".join(capfd.readouterr()))
    states = shapes["state"]
    assert program.memory_analysis().alias_size_in_bytes == states.size * 4
    shape = f"f32[{','.join(map(str, states.shape))}]"
    lines = program.as_text().splitlines()
    assert not [line for line in lines if " copy(" in line and shape in line]
