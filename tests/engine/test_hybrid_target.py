"""A Qwen3.5 in the engine: most of its layers keep a state per slot that cannot be rolled back."""

import jax
import numpy as np
import pytest
from first_right import NAME, propose_right
from golden_pair import budget
from hybrid_pair import VOCAB, hybrid_engine, opened
from known_costs import use_known_costs
from spoilt_states import Distrust, Poisoner

from jaxspec.cache.states import States
from jaxspec.engine.step.observer import StepObserver

DRAW = np.random.default_rng(3)
PROMPTS = [DRAW.integers(0, VOCAB - 1, size).tolist() for size in (3, 33, 17, 70, 1, 9)]
BUDGETS = [21, 5, 40, 13, 1, 30]
"""So that requests end at different steps, and their slots go to others."""


def generate(method="none", sampling=None, **options):
    engine = hybrid_engine(method, **options)
    sampling = sampling or {}
    return engine.generate(PROMPTS, [budget(count, **sampling) for count in BUDGETS])


def tokens(outputs) -> list[list[int]]:
    assert not any(output.error for output in outputs)
    return [list(output.token_ids) for output in outputs]


@pytest.fixture(scope="module")
def plain():
    outputs = generate()
    assert len({tuple(told[:5]) for told in tokens(outputs)}) > 3, "all texts are the same"
    return outputs


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("dflash", {"adaptive": True}),
        ("none", {"driver": "lockstep"}),
        (
            "none",
            {"prefill_chunk": 16, "prefill_shapes": ((1, 16), (2, 8)), "batch_sizes": (1, 3)},
        ),
    ],
)
def test_other_sizes_and_widths_give_the_same_tokens(plain, method, options, monkeypatch):
    use_known_costs(monkeypatch)
    assert tokens(generate(method, **options)) == tokens(plain)


@pytest.mark.parametrize("driver", ["lockstep", "overlapped"])
@pytest.mark.parametrize("right", range(5))
def test_every_acceptance_length_gives_the_tokens_of_plain_decoding(
    plain, driver, right, monkeypatch
):
    propose_right(monkeypatch, plain, right, VOCAB)
    outputs = generate(NAME, driver=driver, num_drafts=4)
    assert tokens(outputs) == tokens(plain)
    for output in outputs:
        assert set(output.stats.acceptance_lengths[:-2]) <= {right + 1}
    assert any(output.stats.acceptance_lengths[:-2] for output in outputs)


def test_sampled_requests_say_the_same_with_and_without_drafts():
    sampling = {"temperature": 0.8, "seed": 7, "top_p": 0.9}
    drafted = generate("dflash", sampling, draft_sampling="likeliest")
    assert tokens(drafted) == tokens(generate("none", sampling))


class Keeper(StepObserver):
    """Keeps the states of a slot by the number of tokens that they are of."""

    def __init__(self, engine, slot: int = 0):
        self.engine, self.slot = engine, slot
        self.of_lengths: dict[int, list[np.ndarray]] = {}

    def step_begins(self, running):
        state = self.engine.loop.device.state
        layers = [layer for layer in state.cache.layers if isinstance(layer, States)]
        assert len(layers) == 2 and all(layer.written is None for layer in layers)
        arrays = [array[self.slot] for layer in layers for array in jax.tree.leaves(layer)]
        self.of_lengths[int(state.lengths[self.slot])] = [np.array(array) for array in arrays]


def states_of(method: str, prompt: list[int], **options) -> dict[int, list[np.ndarray]]:
    options = {"exact": True} | options
    engine = hybrid_engine(method, **options)
    assert engine.loop.device.models.target.row_by_row == options["exact"]
    keeper = Keeper(engine)
    with engine.observe(keeper):
        engine.generate(prompt, budget(40))
    return keeper.of_lengths


@pytest.mark.parametrize("right", [1, 3, 4])
def test_with_exact_the_states_are_equal_bit_for_bit(plain, right, monkeypatch):
    expected = states_of("none", PROMPTS[2], num_drafts=4)
    propose_right(monkeypatch, plain, right, VOCAB)
    found = states_of(NAME, PROMPTS[2], num_drafts=4)
    shared = sorted(found.keys() & expected.keys() - {0})
    assert 40 // (right + 1) - 2 <= len(shared) < len(expected)
    for length in shared:
        for one, other in zip(found[length], expected[length], strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("right", [0, 4])
def test_in_matrix_products_the_states_are_equal_but_for_rounding(plain, right, monkeypatch):
    """Blocks are read in products, and their corrections added, whatever is kept."""
    expected = states_of("none", PROMPTS[2])
    propose_right(monkeypatch, plain, right, VOCAB)
    found = states_of(NAME, PROMPTS[2], exact=False, row_by_row=False, num_drafts=4)
    shared = sorted(found.keys() & expected.keys() - {0})
    assert 40 // (right + 1) - 2 <= len(shared)
    for length in shared:
        for one, other in zip(found[length], expected[length], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("driver", ["lockstep", "overlapped"])
def test_states_of_slots_without_a_request_are_not_read(plain, driver):
    engine = hybrid_engine("dflash", driver=driver)
    poisoner = Poisoner(engine)
    with engine.observe(poisoner):
        outputs = engine.generate(PROMPTS, [budget(count) for count in BUDGETS])
    assert tokens(outputs) == tokens(plain)
    assert poisoner.count > 20


@pytest.mark.parametrize("method", ["none", "dflash"])
@pytest.mark.parametrize("at", [2, 5, 11])
def test_after_a_fault_texts_are_read_again(plain, method, at):
    engine = hybrid_engine(method)

    with engine.observe(Distrust(engine, at)):
        outputs = engine.generate(PROMPTS, [budget(count) for count in BUDGETS])
    assert tokens(outputs) == tokens(plain)


def test_a_drafter_reads_features_of_both_kinds_of_layers():
    target = opened().models.target
    kinds = {target.config.layer_kinds[layer] for layer in target.capture}
    assert kinds == {"delta", "attention"}
