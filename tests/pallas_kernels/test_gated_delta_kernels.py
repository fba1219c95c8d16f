"""The kernels of the gated delta rule against their references."""

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

DIM = 128
NEAR = {"bfloat16": 2**-8, "float32": 2e-6}
BY_ROW = ("query", "key", "value", "log_decay", "beta")
READ = (*BY_ROW, "state", "slots", "lengths")
FOLD = (*READ[1:], "counts")
PREFILL = (*READ, "counts")
PADDING = 2
"""The slot of requests that are only padding."""


def drawn(batch=2, width=3, key_heads=1, value_heads=2, dtype="bfloat16", seed=0) -> dict:
    """The first request goes on with a text, the second begins one, the others are padding. What
    nobody may read is NaN: rows beyond the counts, the state of a slot where a text begins, and
    slots of others."""
    draw = np.random.default_rng(seed)
    normal = lambda *shape: draw.normal(size=shape)
    state = normal(5, value_heads, DIM, DIM)
    state[[0, 1, 3]] = np.nan
    given = {
        "query": jnp.asarray(normal(batch, width, key_heads, DIM), dtype),
        "key": jnp.asarray(normal(batch, width, key_heads, DIM), dtype),
        "value": jnp.asarray(normal(batch, width, value_heads, DIM), dtype),
        "log_decay": jnp.asarray(-np.abs(normal(batch, width, value_heads)), jnp.float32),
        "beta": jnp.asarray(draw.uniform(0, 1, (batch, width, value_heads)), jnp.float32),
        "state": jnp.asarray(state, jnp.float32),
        "slots": jnp.asarray([4, 0, *[PADDING] * (batch - 2)][:batch], jnp.int32),
        "lengths": jnp.asarray([7, 0, *[0] * (batch - 2)][:batch], jnp.int32),
        "counts": jnp.asarray([width, width - 1, *[0] * (batch - 2)][:batch], jnp.int32),
    }
    return given


def spoilt(given: dict) -> dict:
    beyond = jnp.arange(given["key"].shape[1]) >= given["counts"][:, None]
    spoil = lambda x: jnp.where(beyond.reshape(*beyond.shape, *[1] * (x.ndim - 2)), jnp.nan, x)
    return given | {name: spoil(given[name]) for name in BY_ROW}


def kept(given: dict, outputs) -> np.ndarray:
    outputs = np.asarray(outputs, np.float32)
    return np.concatenate(
        [rows[:count].ravel() for rows, count in zip(outputs, np.asarray(given["counts"]))]
    )


def chosen(given: dict, names) -> list:
    return [given[name] for name in names]


def read(given: dict) -> jax.Array:
    with no_races() as interpret:
        return jax.block_until_ready(mosaic.delta_read(*chosen(given, READ), interpret=interpret))


def fold(given: dict) -> jax.Array:
    with no_races() as interpret:
        return jax.block_until_ready(mosaic.delta_fold(*chosen(given, FOLD), interpret=interpret))


def prefill(given: dict) -> tuple[jax.Array, jax.Array]:
    with no_races() as interpret:
        done = mosaic.delta_prefill(*chosen(given, PREFILL), interpret=interpret)
        return jax.block_until_ready(done)


def on_device(op, names):
    return lambda given: jax.jit(functools.partial(op, implementation="mosaic"))(
        **{name: given[name] for name in names}
    )


read_on_device = on_device(pallas_kernels.delta_read, READ)
fold_on_device = on_device(pallas_kernels.delta_fold, FOLD)
prefill_on_device = on_device(pallas_kernels.delta_prefill, PREFILL)


def reads_agree(given: dict, run) -> None:
    dtype = str(given["value"].dtype)
    out = run(given)
    expected = reference.delta_read(*chosen(given, READ))
    assert out.shape == expected.shape and out.dtype == expected.dtype
    near = NEAR[dtype]
    np.testing.assert_allclose(kept(given, out), kept(given, expected), rtol=near, atol=near)


def folds_agree(given: dict, run) -> None:
    out, expected = run(given), reference.delta_fold(*chosen(given, FOLD))
    np.testing.assert_allclose(out, expected, rtol=2e-6, atol=2e-6)  # NaN where nobody writes


def prefills_agree(given: dict, run) -> None:
    """With the rows as `delta_read` and `delta_fold` specify them, not as the chunks round them."""
    out, after = run(given)
    expected = reference.delta_read(*chosen(given, READ))
    near = NEAR[str(given["value"].dtype)]
    np.testing.assert_allclose(kept(given, out), kept(given, expected), rtol=near, atol=near)
    assert np.isfinite(np.asarray(out, np.float32)).all()
    begun = reference.before_block(*chosen(given, ("state", "slots", "lengths")))
    own = {"state": begun, "slots": jnp.arange(len(begun)), "lengths": jnp.ones(len(begun), int)}
    states = reference.delta_fold(*chosen(given | own, FOLD))
    np.testing.assert_allclose(after, states, rtol=5e-6, atol=5e-6)


SMALL = [
    {},
    {"width": 1, "key_heads": 2, "value_heads": 4},
    {"batch": 4, "width": 2, "key_heads": 1, "value_heads": 3, "dtype": "float32"},
    {"batch": 1, "width": 16},
]
LARGE = [
    {"batch": batch, "width": width, "key_heads": 16, "value_heads": heads}
    for batch, width, heads in ((1, 1, 32), (8, 16, 32), (3, 16, 48), (2, 64, 48))
]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_rows_are_read(case: dict):
    reads_agree(spoilt(drawn(**case)), read)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_rows_are_folded_in(case: dict):
    folds_agree(spoilt(drawn(**case)), fold)


@pytest.mark.parametrize("counts", [(35, 0), (7, 33)])
def test_a_long_block(counts: tuple[int, int]):
    given = drawn(width=35, value_heads=1, dtype="float32")
    prefills_agree(spoilt(given | {"counts": jnp.asarray(counts, jnp.int32)}), prefill)


def test_a_long_block_has_the_bits_of_its_rows():
    given = drawn(width=34, value_heads=1, dtype="float32") | {"counts": jnp.full(2, 34, jnp.int32)}
    out, after = prefill(given)
    np.testing.assert_array_equal(out, read(given))
    np.testing.assert_array_equal(after, fold(given)[given["slots"]])


def test_sixteen_key_heads_serve_all_value_heads():
    given = drawn(batch=1, width=1, key_heads=16, value_heads=48)
    reads_agree(given, read)
    folds_agree(given, fold)


@pytest.mark.parametrize("counts", [(0, 16), (5, 1), (16, 11)])
def test_any_number_of_rows_is_folded_in(counts: tuple[int, int]):
    given = drawn(width=16, value_heads=1) | {"counts": jnp.asarray(counts, jnp.int32)}
    folds_agree(spoilt(given), fold)


def test_padding_that_shares_a_slot_leaves_it_as_it_is():
    given = spoilt(drawn(batch=4, width=2))
    np.testing.assert_array_equal(fold(given)[PADDING], given["state"][PADDING])


def bits_do_not_depend_on_the_cut(read, fold, **case) -> None:
    """A block at once, or in pieces that are folded in one after the other."""
    given = drawn(width=7, **case)
    given = given | {"counts": jnp.full_like(given["counts"], 7)}
    whole, outputs = fold(given), read(given)
    start, state = 0, given["state"]
    for size in (1, 4, 2):
        piece = given | {name: given[name][:, start : start + size + 1] for name in BY_ROW}
        piece |= {"state": state, "lengths": given["lengths"] + start}
        piece |= {"counts": jnp.full_like(given["counts"], size)}
        np.testing.assert_array_equal(
            np.asarray(read(piece)[:, :size], np.float32),
            np.asarray(outputs[:, start : start + size], np.float32),
        )
        state, start = fold(piece), start + size
    np.testing.assert_array_equal(state, whole)


def test_the_bits_do_not_depend_on_the_cut():
    bits_do_not_depend_on_the_cut(read, fold, value_heads=1, dtype="float32")


@pytest.mark.gpu
class TestOnDevice:
    @pytest.mark.parametrize("case", SMALL + LARGE, ids=str)
    def test_rows_are_read(self, case: dict):
        reads_agree(spoilt(drawn(**case)), read_on_device)

    @pytest.mark.parametrize("case", SMALL + LARGE, ids=str)
    def test_rows_are_folded_in(self, case: dict):
        folds_agree(spoilt(drawn(**case)), fold_on_device)

    @pytest.mark.parametrize("width", [3, 64, 500])
    def test_a_long_block(self, width: int):
        case = {"batch": 3, "width": width, "key_heads": 16, "value_heads": 32}
        prefills_agree(spoilt(drawn(**case, dtype="float32")), prefill_on_device)

    def test_the_bits_do_not_depend_on_the_cut(self):
        bits_do_not_depend_on_the_cut(
            read_on_device, fold_on_device, key_heads=16, value_heads=32, dtype="float32"
        )


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"width": 65}, "65 rows in a block; expected at most 64"),
        ({"key_heads": 2, "value_heads": 3}, "3 value heads and 2 key heads"),
    ],
)
def test_the_kernels_say_no(changed: dict, said: str):
    given = drawn(**changed)
    for op, names in ((pallas_kernels.delta_read, READ), (pallas_kernels.delta_fold, FOLD)):
        with pytest.raises(NotForThisKernel, match=said):
            op(**{name: given[name] for name in names}, implementation="mosaic")


def test_states_must_be_float32():
    given = drawn()
    given["state"] = given["state"].astype(jnp.bfloat16)
    with pytest.raises(NotForThisKernel, match="states in bfloat16; expected float32"):
        pallas_kernels.delta_read(**{name: given[name] for name in READ}, implementation="mosaic")


@needs_compiler
@pytest.mark.parametrize(("batch", "width", "value_heads"), [(8, 16, 32), (1, 1, 48), (2, 64, 48)])
def test_they_compile_without_spills_and_fold_in_place(
    batch: int, width: int, value_heads: int, monkeypatch, capfd
):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    case = {"batch": batch, "width": width, "key_heads": 16, "value_heads": value_heads}
    shapes = placed(jax.eval_shape(lambda: drawn(**case)))
    compiled(jax.jit(mosaic.delta_read).lower(*chosen(shapes, READ)))
    long = placed(jax.eval_shape(lambda: drawn(**case | {"width": 31 * width + 2})))
    compiled(jax.jit(mosaic.delta_prefill).lower(*chosen(long, PREFILL)))
    folding = jax.jit(mosaic.delta_fold, donate_argnums=FOLD.index("state"))
    program = compiled(folding.lower(*chosen(shapes, FOLD)))
    assert_no_spills("".join(capfd.readouterr()))
    states = shapes["state"]
    assert program.memory_analysis().alias_size_in_bytes == states.size * 4
    shape = f"f32[{','.join(map(str, states.shape))}]"
    lines = program.as_text().splitlines()
    assert not [line for line in lines if " copy(" in line and shape in line]
