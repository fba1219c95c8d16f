"""Short blocks in matrix products: the kernels and their references against the formula of
`api.py` in float64, row by row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h100 import assert_no_spills, compiled, needs_compiler, placed
from interpreter import no_races
from test_mixer_kernels import DIM, READ, chosen, drawn, kept, spoilt

import pallas_kernels
from pallas_kernels import NotForThisKernel
from pallas_kernels.gated_delta import block_mosaic, reference
from pallas_kernels.gated_delta.block_form import Folding
from pallas_kernels.gated_delta.reference import EPS

OF_SLOTS = ("state", "slots", "lengths", "counts")
NEAR_BFLOAT16, NEAR_FLOAT32 = 2**-8, 1e-5
"""The outputs are rounded to the dtype of the projection; states are not."""


def formula(given: dict) -> tuple[np.ndarray, np.ndarray]:
    """Outputs of every row, and states before the block and after every row, in float64."""
    made = reference.rows_in_slots(*chosen(given, READ))
    query, key, value, log_decay, beta = (np.asarray(part, np.float64) for part in made)
    shared = value.shape[2] // key.shape[2]
    unit = lambda x: np.repeat(x / np.sqrt((x**2).sum(-1, keepdims=True) + EPS), shared, axis=2)
    key, query = unit(key), unit(query) * key.shape[-1] ** -0.5
    begun = reference.before_block(*chosen(given, OF_SLOTS[:3]))
    states, outputs = [np.asarray(begun, np.float64)], []
    for i in range(value.shape[1]):
        state = states[-1] * np.exp(log_decay[:, i, :, None, None])
        wrong = value[:, i] - np.einsum("rhkv,rhk->rhv", state, key[:, i])
        corrected = beta[:, i, :, None] * wrong
        states.append(state + key[:, i, :, :, None] * corrected[:, :, None])
        outputs.append(np.einsum("rhkv,rhk->rhv", states[-1], query[:, i]))
    return np.stack(outputs, axis=1), np.stack(states, axis=1)


def by_reference(given: dict) -> tuple:
    read = pallas_kernels.block_read(*chosen(given, READ), implementation="xla")
    return *read, functools.partial(pallas_kernels.block_fold, implementation="xla")


def by_kernel(given: dict) -> tuple:
    with no_races() as interpret:
        read = block_mosaic.block_read(*chosen(given, READ), interpret=interpret)
        jax.block_until_ready(read)
    return *read, fold_by_kernel


def fold_by_kernel(*given: jax.Array) -> tuple[jax.Array, jax.Array]:
    with no_races() as interpret:
        return jax.block_until_ready(fold_with_mosaic(*given, interpret=interpret))


def fold_with_mosaic(*given: jax.Array, interpret=None) -> tuple[jax.Array, jax.Array]:
    """The kernel of one layer."""
    layer, of_requests = Folding(*given[:-3]), given[-3:]
    return block_mosaic.block_folds((layer,), *of_requests, interpret=interpret)[0]


def on_device(given: dict) -> tuple:
    on_mosaic = lambda op: jax.jit(functools.partial(op, implementation="mosaic"))
    read = on_mosaic(pallas_kernels.block_read)(*chosen(given, READ))
    return *read, on_mosaic(pallas_kernels.block_fold)


def agrees(given: dict, run) -> None:
    """The outputs of all rows that count, and the states after them; NaN where nobody writes."""
    out, corrected, fold = run(given)
    expected, states = formula(given)
    assert out.dtype == given["inputs"].dtype and np.isfinite(kept(given, expected)).all()
    near = NEAR_BFLOAT16 if out.dtype == jnp.bfloat16 else NEAR_FLOAT32
    np.testing.assert_allclose(kept(given, out), kept(given, expected), rtol=near, atol=near)
    after, tails = fold(*to_fold(given, corrected))
    wanted, last = np.array(given["state"], np.float64), np.array(given["tails"])
    for r, (slot, count) in enumerate(zip(given["slots"], given["counts"])):
        if count > 0:
            wanted[slot] = states[r, count]
            last[slot] = seen_by_convolution(given, r)[count : count + last.shape[1]]
    np.testing.assert_allclose(after, wanted, rtol=NEAR_FLOAT32, atol=NEAR_FLOAT32)
    np.testing.assert_array_equal(np.asarray(tails, np.float32), last.astype(np.float32))


def to_fold(given: dict, corrected) -> tuple:
    return given["inputs"], *corrected, given["tails"], *chosen(given, OF_SLOTS)


def seen_by_convolution(given: dict, request: int) -> np.ndarray:
    """The tail before a request's block, and the block's channels."""
    tail = np.array(given["tails"][given["slots"][request]])
    if given["lengths"][request] == 0:
        tail = np.zeros_like(tail)
    return np.concatenate([tail, given["inputs"][request, :, : tail.shape[1]]])


def equal_keys(batch: int, width: int = 16, **case) -> dict:
    """Rows that are all the same and hardly decay. The triangle is then as far from the unit matrix
    as it can be, and its powers are so large that an inverse made of them has no right digit."""
    given = drawn(batch, width, **case)
    heads, channels = given["decay_bias"].size, given["taps"].shape[1]
    inputs = given["inputs"].at[:].set(given["inputs"][:1, :1])
    inputs = inputs.at[..., -heads:].set(-4).at[..., -2 * heads : -heads].set(5)
    tails = given["tails"].at[:].set(inputs[0, :1, :channels])
    slow = {"decay_bias": jnp.zeros(heads), "log_rate": jnp.full(heads, -6.0)}
    return given | {"inputs": inputs, "tails": tails} | slow


SMALL = [
    {"batch": 2, "width": 16, "value_heads": 1},
    {"batch": 3, "width": 5, "key_heads": 1, "value_heads": 2},
]
LARGE = [
    {"batch": batch, "width": width, "key_heads": 16, "value_heads": heads}
    for batch, width, heads in ((1, 16, 32), (8, 16, 32), (32, 16, 32), (3, 7, 48))
]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_the_kernels_agree_with_the_formula(case: dict):
    agrees(spoilt(drawn(**case)), by_kernel)


@pytest.mark.parametrize(
    "case", [{"dtype": "float32"}, {"width": 9, "key_heads": 2, "value_heads": 4}], ids=str
)
def test_the_references_agree_with_the_formula(case: dict):
    agrees(spoilt(drawn(**case)), by_reference)


@pytest.mark.parametrize("run", [by_reference, by_kernel])
def test_equal_keys_that_hardly_decay(run):
    agrees(equal_keys(1, value_heads=1), run)


def gates_agree(given: dict, read) -> None:
    """The outputs of all rows that count, normed and gated, with what is rounded before that."""
    scale, eps = jnp.linspace(0.5, 2, DIM), 1e-6
    found = read(*chosen(given, READ), scale, eps=eps)[0]
    heads = given["decay_bias"].size
    begin = given["taps"].shape[1]
    gates = np.asarray(given["inputs"][..., begin : begin + heads * DIM], np.float64)
    outputs = np.asarray(formula(given)[0].astype(found.dtype), np.float64)
    normed = outputs / np.sqrt((outputs**2).mean(-1, keepdims=True) + eps) * np.asarray(scale)
    expected = normed * (gates / (1 + np.exp(-gates))).reshape(outputs.shape)
    assert np.isfinite(kept(given, expected)).all() and found.dtype == given["inputs"].dtype
    near = 4 * NEAR_BFLOAT16
    np.testing.assert_allclose(kept(given, found), kept(given, expected), rtol=near, atol=near)


GATED = [{"batch": 2, "width": 16, "value_heads": 2}, {"batch": 3, "width": 5, "value_heads": 1}]


@pytest.mark.parametrize("case", GATED, ids=str)
def test_outputs_are_normed_and_gated(case: dict):
    given = drawn(**case)
    gates_agree(given, functools.partial(pallas_kernels.block_read, implementation="xla"))
    with no_races() as interpret:
        gates_agree(given, functools.partial(block_mosaic.block_read, interpret=interpret))


def every_count(**case) -> dict:
    """Requests that keep 0, 1, ... 16 rows of the same block after the same state."""
    given = drawn(1, 16, **case)
    requests, state = 17, given["state"][4]
    same = lambda x: jnp.broadcast_to(x, (requests, *x.shape))
    return given | {
        "inputs": same(given["inputs"][0]),
        "tails": same(given["tails"][4]),
        "state": same(state),
        "slots": jnp.arange(requests, dtype=jnp.int32),
        "lengths": jnp.full(requests, 7, jnp.int32),
        "counts": jnp.arange(requests, dtype=jnp.int32),
    }


def test_any_number_of_rows_is_folded_in():
    given = every_count(value_heads=1)
    agrees(given, by_reference)
    agrees(given, lambda given: (*by_reference(given)[:2], fold_by_kernel))


def test_many_blocks_drift_no_further_than_rows():
    """A text of 40 blocks that keep any numbers of rows, of which hardly anything decays."""
    draw = np.random.default_rng(1)
    found = wanted = drawn(1, 16, value_heads=1)["state"]
    for block in range(40):
        given = drawn(1, 16, value_heads=1, dtype="float32", seed=block)
        given |= {"log_rate": jnp.full(1, -5.0), "state": found}
        given["counts"] = jnp.asarray(draw.integers(1, 17, 1), jnp.int32)
        exact = formula(given | {"state": wanted})[1][0, given["counts"][0]]
        _, corrected, fold = by_reference(given)
        found, wanted = fold(*to_fold(given, corrected))[0], wanted.at[4].set(exact)
    np.testing.assert_allclose(found[4], wanted[4], rtol=NEAR_FLOAT32, atol=NEAR_FLOAT32)


def test_padding_that_shares_a_slot_leaves_it_as_it_is():
    given = spoilt(drawn(batch=4, width=2, value_heads=1))
    _, corrected, fold = by_kernel(given)
    after, tails = fold(*to_fold(given, corrected))
    np.testing.assert_array_equal(after[2], given["state"][2])
    np.testing.assert_array_equal(tails[2], given["tails"][2])


@pytest.mark.parametrize("row", [0, 3])
def test_a_row_that_is_no_number_spoils_no_row_before_it_and_all_after_it(row: int):
    given = drawn(1, 5, value_heads=1)
    spoilt_row = given | {"inputs": given["inputs"].at[0, row, 0].set(jnp.nan)}
    (clean, *_), (out, *_) = by_reference(given), by_reference(spoilt_row)
    np.testing.assert_array_equal(out[:, :row], clean[:, :row])
    assert np.isnan(np.asarray(out[:, row:], np.float32)).all()


def of_layers(count: int, **case) -> tuple[tuple[Folding, ...], list]:
    """Blocks of the same requests in several layers, and of which slots they are."""
    given = [spoilt(drawn(seed=layer, **case)) for layer in range(count)]
    read = [by_reference(layer)[1] for layer in given]
    layers = [
        Folding(layer["inputs"], *corrected, layer["tails"], layer["state"])
        for layer, corrected in zip(given, read)
    ]
    return tuple(layers), chosen(given[0], OF_SLOTS[1:])


def agree_with_single_layers(layers: tuple[Folding, ...], of_requests: list, fold) -> None:
    found = fold(layers, *of_requests)
    for layer, folded in zip(layers, found, strict=True):
        alone = fold((layer,), *of_requests)[0]
        for together, single in zip(folded, alone, strict=True):
            same = (np.asarray(one, np.float32) for one in (together, single))
            np.testing.assert_array_equal(*same)


def test_layers_are_folded_together_as_they_are_alone():
    with no_races() as interpret:
        fold = functools.partial(block_mosaic.block_folds, interpret=interpret)
        agree_with_single_layers(*of_layers(3, batch=3, width=9, value_heads=2), fold)


def test_layers_of_other_shapes_are_refused():
    (narrow,), of_requests = of_layers(1, width=5, value_heads=1)
    (wide,), _ = of_layers(1, width=6, value_heads=1)
    with pytest.raises(NotForThisKernel, match="layers of 2 kinds; expected layers of the same"):
        pallas_kernels.block_folds((narrow, wide), *of_requests, implementation="mosaic")


@pytest.mark.gpu
class TestOnDevice:
    @pytest.mark.parametrize("case", GATED + LARGE[1:], ids=str)
    def test_outputs_are_normed_and_gated(self, case: dict):
        read = functools.partial(pallas_kernels.block_read, implementation="mosaic")
        gates_agree(drawn(**case), jax.jit(read, static_argnames="eps"))

    def test_layers_are_folded_together_as_they_are_alone(self):
        fold = jax.jit(functools.partial(pallas_kernels.block_folds, implementation="mosaic"))
        agree_with_single_layers(
            *of_layers(24, batch=8, width=16, key_heads=16, value_heads=32), fold
        )

    @pytest.mark.parametrize("case", SMALL + LARGE, ids=str)
    def test_the_kernels_agree_with_the_formula(self, case: dict):
        agrees(spoilt(drawn(**case)), on_device)

    def test_equal_keys_that_hardly_decay(self):
        agrees(equal_keys(3, key_heads=16, value_heads=32), on_device)

    def test_any_number_of_rows_is_folded_in(self):
        agrees(every_count(key_heads=16, value_heads=32), on_device)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"width": 17}, "17 rows in a block; expected at most 16"),
        ({"dtype": "float32"}, "a projection in float32; expected bfloat16"),
        ({"key_heads": 2, "value_heads": 3}, "3 value heads and 2 key heads"),
    ],
)
def test_the_kernel_says_no(changed: dict, said: str):
    with pytest.raises(NotForThisKernel, match=said):
        pallas_kernels.block_read(*chosen(drawn(**changed), READ), implementation="mosaic")


@functools.partial(jax.jit, donate_argnums=0)
def fold_of_layers(written: list, read: list, of_requests: list) -> tuple:
    layers = tuple(Folding(*some, *into) for some, into in zip(read, written))
    return block_mosaic.block_folds(layers, *of_requests)


def written_and_read(layers: tuple[Folding, ...], given: dict) -> tuple[list, list, list]:
    """The arguments of `fold_of_layers`; the first of them are written in place."""
    return [one[4:] for one in layers], [one[:4] for one in layers], chosen(given, OF_SLOTS[1:])


@needs_compiler
@pytest.mark.parametrize(("batch", "width", "value_heads"), [(32, 16, 32), (1, 7, 48)])
def test_they_compile_without_spills_and_fold_in_place(
    batch: int, width: int, value_heads: int, monkeypatch, capfd
):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    case = {"batch": batch, "width": width, "key_heads": 16, "value_heads": value_heads}
    shapes = jax.eval_shape(lambda: drawn(**case))
    norm = jax.ShapeDtypeStruct((DIM,), jnp.float32)
    for scale in ([], [norm]):
        given = placed([*chosen(shapes, READ), *scale])
        compiled(jax.jit(block_mosaic.block_read).lower(*given))
    _, corrected = jax.eval_shape(block_mosaic.block_read, *chosen(shapes, READ))
    layer = Folding(shapes["inputs"], *corrected, shapes["tails"], shapes["state"])
    program = compiled(fold_of_layers.lower(*placed(written_and_read((layer,) * 24, shapes))))
    assert_no_spills("".join(capfd.readouterr()))
    states, tails = shapes["state"], shapes["tails"]
    in_place = 24 * (states.size * 4 + tails.size * 2)
    assert program.memory_analysis().alias_size_in_bytes == in_place
    shape = f"f32[{','.join(map(str, states.shape))}]"
    lines = program.as_text().splitlines()
    assert not [line for line in lines if " copy(" in line and shape in line]
