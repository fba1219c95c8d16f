"""The gated delta rule against its formula in float64, row by row."""

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels

BATCH, KEY_HEADS, KEY_DIM, VALUE_DIM, SLOTS = 3, 2, 16, 8, 5
NEAR = 2e-6


def drawn(width: int, value_heads: int = 4, seed: int = 0):
    """Inputs by name; the second request is at the start of its text."""
    draw = np.random.default_rng(seed)
    normal = lambda *shape: draw.normal(size=shape).astype(np.float32)
    return {
        "query": normal(BATCH, width, KEY_HEADS, KEY_DIM),
        "key": normal(BATCH, width, KEY_HEADS, KEY_DIM),
        "value": normal(BATCH, width, value_heads, VALUE_DIM),
        "log_decay": -np.abs(normal(BATCH, width, value_heads)),
        "beta": draw.uniform(0, 1, (BATCH, width, value_heads)).astype(np.float32),
        "state": jnp.asarray(normal(SLOTS, value_heads, KEY_DIM, VALUE_DIM)),
        "slots": jnp.array([2, 0, 4]),
        "lengths": jnp.array([7, 0, 19]),
    }


def formula(inputs):
    """Outputs of every row, and the states before the block and after every row, in float64."""
    width, value_heads = inputs["value"].shape[1:3]
    shared = value_heads // KEY_HEADS
    outputs = np.zeros((BATCH, width, value_heads, VALUE_DIM))
    states = np.zeros((BATCH, width + 1, value_heads, KEY_DIM, VALUE_DIM))
    unit = lambda x: x / np.sqrt((x**2).sum() + 1e-6)
    for r in range(BATCH):
        if inputs["lengths"][r] > 0:
            states[r, 0] = inputs["state"][inputs["slots"][r]]
        for i in range(width):
            for h in range(value_heads):
                key = unit(inputs["key"][r, i, h // shared].astype(float))
                query = unit(inputs["query"][r, i, h // shared].astype(float)) * KEY_DIM**-0.5
                state = states[r, i, h] * np.exp(inputs["log_decay"][r, i, h].astype(float))
                wrong = inputs["value"][r, i, h] - key @ state
                state = state + np.outer(key, inputs["beta"][r, i, h] * wrong)
                states[r, i + 1, h] = state
                outputs[r, i, h] = query @ state
    return outputs, states


def run(op, inputs, **more):
    return op(**{name: jnp.asarray(value) for name, value in (inputs | more).items()})


def read(inputs):
    return run(pallas_kernels.delta_read, inputs)


def folded(inputs, counts):
    without_query = {name: value for name, value in inputs.items() if name != "query"}
    return run(pallas_kernels.delta_fold, without_query, counts=np.asarray(counts))


def prefilled(inputs, counts):
    return run(pallas_kernels.delta_prefill, inputs, counts=np.asarray(counts))


@pytest.mark.parametrize("value_heads", [2, 4, 6])
def test_rows_are_read_from_the_state(value_heads):
    inputs = drawn(16, value_heads)
    np.testing.assert_allclose(read(inputs), formula(inputs)[0], atol=NEAR)


@pytest.mark.parametrize("counts", [(0, 0, 0), (1, 16, 7), (16, 0, 15)])
def test_the_first_rows_are_folded_in(counts):
    inputs = drawn(16)
    states = folded(inputs, counts)
    expected = np.array(inputs["state"], float)
    for r, count in enumerate(counts):
        if count > 0:
            expected[inputs["slots"][r]] = formula(inputs)[1][r, count]
    np.testing.assert_allclose(states, expected, atol=NEAR)


@pytest.mark.parametrize("width", [1, 63, 64, 65, 150])
def test_a_long_block_in_chunks_is_the_same_as_its_rows(width):
    inputs = drawn(width, seed=1)
    counts = np.array([width, width // 2, 1])
    outputs, after = prefilled(inputs, counts)
    expected, states = formula(inputs)
    for r, count in enumerate(counts):
        np.testing.assert_allclose(outputs[r, :count], expected[r, :count], atol=NEAR)
        np.testing.assert_allclose(after[r], states[r, count], atol=NEAR)


def test_a_chunk_of_equal_keys_that_hardly_decay_is_solved_exactly_enough():
    """The matrix of a chunk is then as far from the unit matrix as it can be."""
    inputs = drawn(128)
    inputs["key"][:] = inputs["key"][:, :1]
    inputs["log_decay"][:], inputs["beta"][:] = -1e-4, 0.99
    outputs, after = prefilled(inputs, [128] * BATCH)
    expected, states = formula(inputs)
    np.testing.assert_allclose(outputs, expected, atol=1e-4)
    np.testing.assert_allclose(after, states[:, -1], atol=1e-4)


def test_rows_that_are_not_kept_and_slots_that_begin_are_not_read():
    inputs, counts = drawn(16), np.array([5, 3, 0])
    spoilt = {name: np.array(value) for name, value in inputs.items()}
    for name in ("query", "key", "value", "log_decay", "beta"):
        for r, count in enumerate(counts):
            spoilt[name][r, count:] = np.nan
    spoilt["state"][[0, 1, 3]] = np.nan  # the start of a text, and slots of others
    spoilt["state"] = jnp.asarray(spoilt["state"])
    outputs, after = prefilled(spoilt, counts)
    clean, clean_after = prefilled(inputs, counts)
    for r, count in enumerate(counts):
        kept = r, slice(count)
        np.testing.assert_array_equal(read(spoilt)[kept], read(inputs)[kept])
        np.testing.assert_array_equal(outputs[kept], clean[kept])
        np.testing.assert_array_equal(after[r], clean_after[r])
    states, clean_states = np.asarray(folded(spoilt, counts)), np.asarray(folded(inputs, counts))
    np.testing.assert_array_equal(states[[2, 0, 4]], clean_states[[2, 0, 4]])
    assert np.isnan(states[[1, 3]]).all()


def test_the_padding_slot_may_occur_more_than_once():
    inputs = drawn(4) | {"slots": jnp.array([2, 4, 4]), "lengths": jnp.array([7, 0, 0])}
    states = folded(inputs, [4, 0, 0])
    np.testing.assert_array_equal(states[4], inputs["state"][4])


def test_the_bits_do_not_depend_on_the_cut():
    """Sixteen rows at once, or in pieces that are folded in one after the other."""
    inputs = drawn(16)
    whole, whole_outputs = folded(inputs, [16] * BATCH), read(inputs)
    start, state = 0, inputs["state"]
    for size in (1, 4, 2, 9):
        piece = {
            name: value[:, start : start + size]
            if name not in ("state", "slots", "lengths")
            else value
            for name, value in inputs.items()
        } | {"state": state, "lengths": inputs["lengths"] + start}
        np.testing.assert_array_equal(read(piece), whole_outputs[:, start : start + size])
        state, start = folded(piece, [size] * BATCH), start + size
    np.testing.assert_array_equal(state, whole)
