"""Decode steps that also read a chunk of a prompt change nobody's tokens, on real programs."""

import jax
import numpy as np
import pytest
from golden_pair import GOLDENS, HOUSE, budget, check_golden, golden_engine, trajectories
from known_costs import use_known_costs
from mixed_runs import always_ready, mixed_engine, staggered
from test_not_finite import BAD, engine_with

from jaxspec.engine.adapt.width import AdaptiveWidth
from jaxspec.engine.engine import Engine
from jaxspec.engine.schedule import beside
from jaxspec.engine.step.compiled import JITTED
from jaxspec.engine.step.mixed import mixed_step
from jaxspec.engine.step.observer import StepObserver

WHOLE, PAGE = 97, 16
TEXT = [token for one in trajectories()[2:7] for token in one["prompt"]]
"""Many tokens, which no prompt of the goldens begins with."""


@pytest.fixture(autouse=True)
def long_prompts_too(monkeypatch):
    """Also those that other programs would read."""
    monkeypatch.setattr(beside, "MOST_STEPS", 100)


def facts(output) -> tuple:
    lengths = output.stats.acceptance_lengths
    return output.token_ids, output.finish_reason, output.error, lengths, output.logprobs


@pytest.mark.slow
@pytest.mark.parametrize(("which", "tokens"), [("a", 16), ("as", 8)])
def test_requests_of_all_lengths_get_what_they_get_alone(which, tokens):
    """Prompts come in a random order while others decode, each with a budget of its own."""
    random = np.random.default_rng(tokens)
    cases = [trajectories(which)[i] for i in random.permutation(len(trajectories(which)))]
    budgets = [int(b) for b in random.integers(20, WHOLE, len(cases))]
    params = [budget(count) for count in budgets]
    engine = mixed_engine(which, tokens)
    outputs, mixed = staggered(engine, [case["prompt"] for case in cases], params, pause=6)
    for output, case, count in zip(outputs, cases, budgets):
        check_golden(output, case, count)
    assert mixed > 15


@pytest.mark.parametrize("which", ["dspark", "dflash2", "eagle3"])
def test_every_kind_of_drafter_has_its_context(which):
    cases = trajectories(which)[1:4]
    prompts, params = [case["prompt"] for case in cases], [budget(60)] * len(cases)
    outputs, mixed = staggered(mixed_engine(which), prompts, params)
    for output, case in zip(outputs, cases):
        check_golden(output, case, 60)
    assert mixed >= 2


def test_a_target_without_a_drafter_has_no_features():
    options = {**HOUSE, "dtype": "float32", "driver": "overlapped", "prefill_beside_decoding": 16}
    alone = Engine.from_pretrained(GOLDENS / "a" / "target", method="ngram", **options)
    cases = trajectories()[1:4]
    prompts, params = [case["prompt"] for case in cases], [budget(40)] * len(cases)
    outputs, mixed = staggered(always_ready(alone), prompts, params)
    for output, case in zip(outputs, cases):
        assert list(output.token_ids) == case["greedy"][:40]
    assert mixed >= 2


def test_plain_decoding():
    cases = trajectories()[1:4]
    prompts, params = [case["prompt"] for case in cases], [budget(60)] * len(cases)
    outputs, mixed = staggered(mixed_engine(method="none"), prompts, params)
    for output, case in zip(outputs, cases):
        assert list(output.token_ids) == case["greedy"][:60]
    assert mixed >= 2


@pytest.mark.slow
def test_sampled_requests_get_what_their_seeds_say():
    """Also their first tokens, which the mixed step draws, and their log probabilities."""
    prompts = [trajectories()[i]["prompt"] for i in (2, 7, 1, 3)]
    sampled = budget(30, temperature=0.9, top_p=0.95, seed=5, logprobs=2)
    params = [budget(60), sampled, budget(30, temperature=0.7, seed=8), budget(20, speculate=False)]
    engine = mixed_engine()
    outputs, mixed = staggered(engine, prompts, params)
    alone = [engine.generate(*asked) for asked in zip(prompts, params)]
    assert mixed >= 6
    for output, one in zip(outputs, alone):
        assert output.token_ids == one.token_ids
        assert output.stats.acceptance_lengths == one.stats.acceptance_lengths
    for own, other in zip(outputs[1].logprobs, alone[1].logprobs):
        assert own.keys() == other.keys()
        np.testing.assert_allclose([*own.values()], [*other.values()], atol=2e-4)


class SharedTokens(StepObserver):
    """How many tokens the requests of each mixed step shared; None for whole blocks."""

    def __init__(self) -> None:
        self.seen: list[int | None] = []

    def program(self, step, inputs, static) -> None:
        if step is mixed_step:
            self.seen.append(static["drafting"].num_tokens)


@pytest.mark.slow
def test_requests_share_out_tokens_beside_a_prompt(monkeypatch):
    """Tokens of requests and of the chunk lie side by side, also while the requests have fewer
    tokens than there is room for, and while a chunk ends in the middle of a row."""
    use_known_costs(monkeypatch)
    monkeypatch.setattr(AdaptiveWidth, "width", lambda self, batch, requests: 4)
    prompts = [TEXT[0:25], TEXT[25:60], TEXT[60:82], TEXT[82:95]]
    params = [budget(90), budget(30), budget(30, temperature=0.8, seed=2), budget(30)]
    options = dict(batch_sizes=(4,), draft_sampling="likeliest")
    engine, shared = mixed_engine(tokens=8, adaptive=True, **options), SharedTokens()
    with engine.observe(shared):
        outputs, mixed = staggered(engine, prompts, params)
    assert mixed >= 5 and {*shared.seen} == {16}, "half of four blocks of 8"
    plain = golden_engine(method="none")
    for prompt, asked, output in zip(prompts, params, outputs, strict=True):
        assert output.token_ids == plain.generate(prompt, asked).token_ids
    assert outputs[0].stats.mean_acceptance_length > 1.6


def test_a_prompt_goes_on_in_the_middle_behind_what_was_found():
    """And what a mixed step has read is found by those that come later."""
    engine = mixed_engine()
    engine.generate(TEXT[:40], budget(2))
    case, longer = trajectories()[1], TEXT[:37] + TEXT[90:131]
    prompts, params = [case["prompt"], longer, longer], [budget(90), budget(20), budget(20)]
    outputs, mixed = staggered(engine, prompts, params, pause=8)
    [alone] = [golden_engine(prefix_caching=False).generate(longer, budget(20))]
    assert [facts(output) for output in outputs[1:]] == [facts(alone)] * 2
    check_golden(outputs[0], case, 90)
    cached = [output.stats.cached_tokens for output in outputs]
    assert cached == [0, 2 * PAGE, len(longer) // PAGE * PAGE] and mixed >= 3


def test_a_prompt_that_is_aborted_in_the_middle_leaves_nothing_behind():
    """Its slot and its pages go to the next, while steps that read it may be under way."""
    engine, cases = mixed_engine(), trajectories()
    early = engine.submit(cases[2]["prompt"], budget(90))
    while engine.num_decoding == 0:
        engine.step([early])
    engine.step([early])
    for late in (7, 6):
        id = engine.submit(cases[late]["prompt"], budget(9))
        for _ in range(4):
            engine.step([early])
        assert 0 < engine.loop.ledger.running[id].prefilled < len(cases[late]["prompt"])
        engine.abort([id])
    rest = [engine.submit(cases[i]["prompt"], budget(20)) for i in (3, 4)]
    outputs = {}
    while len(outputs) < 3:
        events = engine.step([early, *rest])
        outputs |= {event.index: event.output for event in events if event.output}
    check_golden(outputs[early], cases[2], 90)
    for id, case in zip(rest, cases[3:5]):
        check_golden(outputs[id], case, 20)
    assert engine.free_pages == engine.total_pages


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_prompt_with_bad_logits_ends_and_the_others_go_on(temperature):
    """In the middle of the prompt and at its end; its pages then go to others."""
    case, last = trajectories()[2], budget(9, temperature=temperature, seed=4)
    engine = always_ready(engine_with(np.nan, prefill_beside_decoding=16))
    prompts = [
        case["prompt"],
        [5, 6, BAD, *range(7, 40)],
        [5, 6, 7, BAD],
        trajectories()[7]["prompt"],
    ]
    outputs, mixed = staggered(engine, prompts, [budget(60), last, last, budget(9)], pause=4)
    assert [output.finish_reason for output in outputs] == ["length", "error", "error", "length"]
    assert outputs[1].error.startswith("the logits for position 36 are not finite")
    assert outputs[2].error.startswith("the logits for position 4 are not finite")
    assert list(outputs[0].token_ids) == case["greedy"][:60] and mixed >= 5
    assert list(outputs[3].token_ids) == trajectories()[7]["greedy"][:9]


@pytest.mark.parametrize("donated", [False, True])
def test_a_mixed_step_that_dies_changes_nobody_s_tokens(donated):
    engine, cases = mixed_engine(), [trajectories()[i] for i in (2, 6, 3)]
    device, run, died = engine.loop.device, engine.loop.device.run, []

    def failing(step, *inputs, **static):
        if step is not mixed_step or len(died) == 2 or engine.loop.ledger.suspects:
            return run(step, *inputs, **static)
        died.append(step)
        if donated:
            JITTED[step](device.models, device.params, device.state, *inputs, **static)
            assert any(leaf.is_deleted() for leaf in jax.tree.leaves(device.state))
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    device.run = failing
    params = [budget(60), budget(30), budget(20)]
    outputs, _ = staggered(engine, [case["prompt"] for case in cases], params)
    for output, case, one in zip(outputs, cases, params):
        assert list(output.token_ids) == case["greedy"][: one.max_tokens] and output.error is None
    assert len(died) == 2
