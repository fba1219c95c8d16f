"""A narrow step shares out its tokens or is even, whichever gives more tokens per second."""

import importlib
import pathlib
from collections import Counter

import numpy as np
import pytest
from golden_pair import budget, golden_engine, trajectories
from known_costs import use_known_costs
from watching import Drafted

from jaxspec.engine.adapt import width as adapted
from jaxspec.engine.adapt.even import Even, tokens_each
from jaxspec.engine.adapt.sharing_gain import FEWEST_STEPS, SharingGain
from jaxspec.engine.adapt.width import SHARES_EVERY, AdaptiveWidth, choose_width

SCRIPTS = pathlib.Path(__file__).parents[2] / "scripts"
MS = {
    (32, 1): 6.5,
    (32, 4): 10.3,
    (32, Even(4)): 9.9,
    (32, 8): 12.0,
    (32, Even(8)): 11.5,
    (32, 16): 16.3,
}
"""Milliseconds of steps of Qwen3-8B in the loop on an H100, about."""
SIZE = (2, 4)


def test_programs_of_an_even_step_draft_what_they_verify(monkeypatch):
    use_known_costs(monkeypatch)
    plan = golden_engine(adaptive=True, driver="overlapped").plan
    assert plan.choices_of(4) == (1, 4, Even(4), 8)
    assert plan.choices_of(1) == (1, 4, 8), "one request has nobody to share with"
    shared = plan.decode_programs(4, 4, host_drafts=False, draws=False).drafting
    even = plan.decode_programs(4, Even(4), host_drafts=False, draws=False)
    assert even.drafting is not None and shared is not None
    assert (even.width, even.drafting.width, even.drafting.num_tokens) == (4, 4, None)
    assert shared.num_tokens == 16
    assert even in set(plan.every_decode(draws=False)), "warm_up makes it ready"


def gain_of(results: list[tuple[int, int, list[float]]]) -> float:
    """The gain after steps of two requests with these drafts, accepted drafts and chances."""
    sharing = SharingGain()
    for _ in range(FEWEST_STEPS):
        assert not sharing.gains
        sharing.reads(SIZE)
        for result in results:
            drafts, accepted, chances = result
            sharing.add(drafts, accepted, np.array(chances))
    return sharing.gains[SIZE]


@pytest.mark.parametrize(
    ("drafts", "accepted", "even"), [(6, 5, 4), (6, 2, 3), (2, 1, 2), (2, 2, 3.5), (1, 1, 3.25)]
)
def test_what_an_even_step_would_have_given(drafts, accepted, even):
    """Of 3 drafts; the last two results leave open whether further ones would have been right."""
    chances = [0.8, 0.6, 0.3, 0.1, 0.1, 0.1]
    if drafts == 1:
        chances = [0.8, 0.6, 0.4, 0.1, 0.1, 0.1]
    assert gain_of([(drafts, accepted, chances)]) == pytest.approx((1 + accepted) / even)


def test_only_results_of_steps_that_shared_out_count():
    sharing = SharingGain()
    for _ in range(FEWEST_STEPS):
        sharing.reads(SIZE)
        sharing.add(6, 3, np.ones(6))
        sharing.reads(None)
        sharing.add(6, 6, np.ones(6))
    assert sharing.gains == {SIZE: 1.0}


def test_steps_without_drafts_say_nothing():
    """The last token of a request has none, so a step of such requests has no result to add."""
    sharing = SharingGain()
    for _ in range(2 * FEWEST_STEPS):
        sharing.reads(SIZE)
    assert not sharing.gains


def test_requests_of_two_tokens(monkeypatch):
    """Their steps share out and have no drafts."""
    use_known_costs(monkeypatch)
    engine, steps = golden_engine(adaptive=True, driver="overlapped"), []
    sharing, prompt = engine.loop.drafters.adaptive.sharing, trajectories()[0]["prompt"]
    monkeypatch.setattr(sharing, "reads", lambda size: (steps.append(size), reads(size)))
    reads = SharingGain.reads.__get__(sharing)
    monkeypatch.setattr(adapted, "choose_width", lambda *given: 4)
    for _ in range(FEWEST_STEPS + 2):
        outputs = engine.generate([prompt] * 4, budget(2))
        assert [len(output.token_ids) for output in outputs] == [2] * 4
    assert steps.count((4, 4)) > FEWEST_STEPS


@pytest.mark.parametrize(("gain", "width"), [(1.0, Even(8)), (1.03, Even(8)), (1.1, 8), (1.3, 8)])
def test_the_gain_is_set_against_the_time(gain, width):
    survival = np.tile(np.cumprod(np.full(15, 0.8)), (32, 1))
    gains = {(32, 8): gain, (32, 4): 1.0}
    assert choose_width(32, 32, 0, (0.8,) * 15, MS, 1, survival, gains) == width


def test_now_and_then_a_step_shares_out():
    costs = {(2, 1): 9.0, (2, 4): 1.2, (2, Even(4)): 1.0, (2, 8): 9.0}
    adaptive, widths = AdaptiveWidth(costs, shares_tokens=True), []
    for request in range(2):
        adaptive.commit(request, ())
    for _ in range(3 * SHARES_EVERY):
        widths.append(adaptive.width(2, range(2)))
        adaptive.note_time((2, widths[-1]), 0.0, 0.0, False)
        for request in range(2):
            adaptive.commit(request, (), 3, 2)
    assert widths == ([Even(4)] * (SHARES_EVERY - 1) + [4]) * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lengths", "least", "mostly"),
    [((6.54, 4.24), 0.98, Even(8)), ((6.54, 6.54), 0.98, Even(8)), ((9, 2), 1.1, 8)],
)
def test_no_more_is_lost_than_two_percent_of_the_best_fixed_width(
    lengths, least, mostly, monkeypatch
):
    """Drawn acceptance, times as on a GPU; half of the requests have each mean length."""
    monkeypatch.syspath_prepend(SCRIPTS)
    simulated = importlib.import_module("verify_budget")
    chosen: Counter = Counter()
    choose = AdaptiveWidth.width

    def counted(self, batch, requests):
        width = choose(self, batch, requests)
        chosen[width] += 1
        return width

    monkeypatch.setattr(AdaptiveWidth, "width", counted)
    speed = simulated.shared(32, lengths, MS)
    fixed = [
        simulated.fixed(32, lengths, tokens_each(width), {(32, tokens_each(width)): ms})
        for (_, width), ms in MS.items()
    ]
    assert speed > least * max(fixed)
    assert chosen.most_common(1)[0][0] == mostly


@pytest.mark.parametrize("driver", ["overlapped", "lockstep"])
def test_the_text_does_not_depend_on_the_forms_of_steps(driver, monkeypatch):
    """Short and long requests, whose ends are staggered, with the form changing in every step."""
    use_known_costs(monkeypatch)
    turns = iter([Even(4), 4, 8, Even(4), 1] * 200)
    monkeypatch.setattr(AdaptiveWidth, "width", lambda self, batch, requests: next(turns))
    engine, drafted = golden_engine(adaptive=True, driver=driver, batch_sizes=(4,)), Drafted()
    cases = trajectories()[:6]
    budgets = [budget(n) for n in (9, 60, 14, 45, 30, 52)]
    with engine.observe(drafted):
        outputs = engine.generate([case["prompt"] for case in cases], budgets)
    for output, case, wanted in zip(outputs, cases, budgets, strict=True):
        assert list(output.token_ids) == case["dflash_tokens"][: wanted.max_tokens]
    forms = {(width, num_tokens) for _, width, num_tokens in drafted.seen}
    assert forms == {(4, None), (8, 16), (8, None)}
    spec_steps = sum(output.stats.num_spec_steps for output in outputs)
    accepted = sum(output.stats.num_accepted_draft_tokens for output in outputs)
    assert accepted > spec_steps, "drafts of even steps are accepted as well"
