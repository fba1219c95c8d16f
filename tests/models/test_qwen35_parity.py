"""Qwen3.5 equals transformers' Qwen3.5, whichever way the prompt goes through pages and states."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoint.load import open_target
from jaxspec.models.qwen35 import Qwen35
from jaxspec.models.whole_sequences import target_features
from oracles import hybrid_layers, records
from oracles.folders import write_hybrid
from oracles.hybrid_decoding import SLOTS, WIDTH, Decoding, Model

NAMES = records.names("qwen35")
IN_ONE_PIECE = ["long", "published_heads"]
"""The models that read a prompt in one piece; the others read theirs in chunks."""
TOKEN_BY_TOKEN = ["long", "tied"]
"""The models that decode token by token; the others decode in blocks of every length."""
DRAFTS = 15
PREFIX = 6
"""Tokens before the first block of drafts."""
OUTPUTS, STATES = 1e-5, 3e-5
"""Largest relative differences in float32."""


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    @functools.cache
    def open_model(name: str) -> Model:
        config = records.read("qwen35", name).config
        shards = 3 if name == "untied" else 1
        folder = write_hybrid(tmp_path_factory.mktemp(name), config, shards)
        checkpoint = open_target(folder)
        layers = tuple(range(checkpoint.config.decoder.num_layers))
        return Model(Qwen35(checkpoint.config, layers), checkpoint.load(jnp.float32))

    return open_model


@functools.cache
def float64_states(name: str) -> list[list]:
    """The second oracle's states of every linear layer after every token."""
    record = records.read("qwen35", name)
    layers = hybrid_layers.linear_layers(record.config)
    return [hybrid_layers.layer_in_float64(record, layer)[1] for layer in layers]


def begun(name: str, opened, *texts: np.ndarray) -> Decoding:
    return Decoding(opened(name), *(texts or [records.read("qwen35", name).prompt]))


def check(decoding: Decoding, name: str) -> None:
    """Everything that every slot computed, and what it remembers."""
    outputs = records.read("qwen35", name).outputs
    for slot in np.flatnonzero(decoding.lengths[:SLOTS]):
        length = decoding.lengths[slot]
        logits, features = decoding.logits(slot), decoding.features(slot)
        assert records.relative_error(logits, outputs["logits"][:length]) < OUTPUTS
        for ours, reference in zip(features, outputs["after_layers"], strict=True):
            assert records.relative_error(ours, reference[:length]) < OUTPUTS
        for ours, states in zip(decoding.states(slot), float64_states(name), strict=True):
            newest = states[length - 1]
            check_state(ours, newest.heads, newest.inputs)


def check_state(ours: tuple, matrices: np.ndarray, tails: np.ndarray) -> None:
    assert records.relative_error(ours[0], matrices) < STATES
    assert records.relative_error(ours[1], tails) < STATES


@pytest.mark.parametrize("name", IN_ONE_PIECE)
def test_a_prompt_in_one_piece(name, opened):
    decoding = begun(name, opened)
    length = len(decoding.texts[0])
    decoding.chunk({1: length, 0: length, 2: length - 1}, width=length)
    check(decoding, name)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in IN_ONE_PIECE])
def test_a_prompt_in_ragged_chunks(name, opened):
    """Chunks shorter and longer than the convolution looks back, and slots that wait."""
    decoding = begun(name, opened)
    for counts in (7, 3), (1, 9), (11, 0), (2, 14), (16, 1), (1, 2), (2, 11):
        decoding.chunk({4: counts[0], 9: counts[1]})
    assert decoding.lengths[4] == decoding.lengths[9] == 40
    check(decoding, name)


def test_a_chunk_longer_than_those_of_the_block_form(opened):
    """The recurrence is computed 64 tokens at a time; here a state goes from one to the next."""
    decoding = begun("long", opened)
    decoding.chunk({0: 1, 1: 80}, width=83)
    decoding.chunk({1: 3, 0: 80}, width=83)
    assert list(decoding.lengths[:2]) == [81, 83]
    check(decoding, "long")


@pytest.mark.parametrize("name", TOKEN_BY_TOKEN)
def test_token_by_token_after_a_prefix(name, opened):
    record, decoding = records.read("qwen35", name), begun(name, opened)
    decoding.chunk({0: 16})
    decoding.chunk({0: 5})
    for step in range(len(record.prompt) - 21):
        decoding.drafts({0: 1, 1: int(step < 9)}, width=1)
    assert list(decoding.lengths[:2]) == [len(record.prompt), 9]
    check(decoding, name)
    if "states" in record.outputs:
        recorded = zip(record.outputs["states"], record.outputs["convolutions"], strict=True)
        for ours, (heads, inputs) in zip(decoding.states(slot=0), recorded, strict=True):
            check_state(ours, heads, inputs.T)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in TOKEN_BY_TOKEN])
def test_every_acceptance_length_and_every_one_after_it(name, opened):
    """Slot n keeps n drafts of its first block, and another number of its second."""
    decoding, every = begun(name, opened), range(DRAFTS + 1)
    decoding.chunk(dict.fromkeys(reversed(every), PREFIX))
    mixed = [*every[5:], *every[:5]]
    first = {n: n + 1 for n in mixed}
    decoding.drafts(first)
    check(decoding, name)
    second = {n: (7 * n + 3) % 16 + 1 for n in mixed}
    assert len({*second.values()}) == DRAFTS + 1 and second != first
    decoding.drafts(second)
    assert all(decoding.lengths[n] == PREFIX + first[n] + second[n] for n in every)
    check(decoding, name)
    decoding.drafts({n: n % 3 for n in mixed})
    check(decoding, name)


def test_right_drafts_that_are_dropped_leave_no_trace(opened):
    """A block may end within what was right, as a limit on the length ends it."""
    decoding = begun("untied", opened)
    decoding.chunk({0: 5, 1: 9})
    for kept in 3, 1, 7:
        decoding.drafts({0: 16, 1: 16}, kept={0: kept, 1: 8 - kept})
    check(decoding, "untied")


@pytest.mark.parametrize("way", ["chunk", "drafts"])
def test_a_slot_forgets_the_request_before(way, opened):
    decoding = begun("untied", opened)
    decoding.chunk({0: 16, 1: 16})
    decoding.drafts({0: 9, 1: 9})
    decoding.forget(slot=1)
    getattr(decoding, way)({1: 2})
    decoding.drafts({0: 4, 1: 11})
    check(decoding, "untied")


def test_slots_that_take_no_part_keep_their_bits(opened):
    decoding = begun("untied", opened)
    decoding.chunk({0: 7, 1: 8, 2: 9})
    before = decoding.states(slot=1)
    decoding.drafts({0: 3, 1: 0, 2: 4})
    decoding.drafts({2: 2, 0: 5})
    decoding.chunk({0: 3, 1: 0, 2: 4})
    for ours, kept in zip(decoding.states(slot=1), before, strict=True):
        np.testing.assert_array_equal(ours[0], kept[0])
        np.testing.assert_array_equal(ours[1], kept[1])
    check(decoding, "untied")


@pytest.mark.parametrize("name", NAMES)
def test_greedy_continuations_equal_transformers(name, opened):
    record = records.read("qwen35", name)
    prompts, expected = record.case["greedy"], record.outputs["greedy"]
    texts = [np.append(record.prompt[:n], rest) for n, rest in zip(prompts, expected)]
    decoding = begun(name, opened, *texts)
    decoding.chunk({slot: min(n, WIDTH) for slot, n in enumerate(prompts)})
    while (left := [len(text) - decoding.lengths[slot] for slot, text in enumerate(texts)]) != [
        0
    ] * 3:
        decoding.drafts({slot: min(int(n), 9) for slot, n in enumerate(left)})
    for slot, (n, rest) in enumerate(zip(prompts, expected, strict=True)):
        chosen = decoding.logits(slot).argmax(axis=-1)
        np.testing.assert_array_equal(chosen[n - 1 : -1], rest)


@pytest.mark.parametrize("name", ["long", "published_heads"])
def test_whole_sequences_as_training_reads_them(name, opened):
    record, model = records.read("qwen35", name), opened(name)
    prompt = jnp.asarray(record.prompt)[None]
    hidden, features = jax.jit(target_features, static_argnums=0)(
        model.module, model.params, prompt
    )
    assert records.relative_error(np.asarray(hidden[0]), record.outputs["hidden"]) < OUTPUTS
    after_layers = record.outputs["after_layers"]
    captured = np.split(np.asarray(features[0]), len(after_layers), axis=-1)
    for ours, reference in zip(captured, after_layers, strict=True):
        assert records.relative_error(ours, reference) < OUTPUTS
