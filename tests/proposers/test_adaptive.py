"""Adaptive spans: the width follows acceptance and cost, and no token follows the width."""

import dataclasses

import numpy as np
import pytest
from golden_pair import budget, golden_engine, noisy_drafter, trajectories

from jaxspec.engine.plan import EngineOptions
from jaxspec.engine.spans import (
    NOTHING,
    AdaptiveSpans,
    Survival,
    after_step,
    choose_width,
    expected_tokens,
)
from jaxspec.errors import UsageError

WIDTHS = (1, 4, 8, 16)
COSTS = {
    (rows, width): base + slope * rows * (width - 1) + 0.15 * (width > 1)
    for rows, base, slope in [(1, 1.0, 0.005), (4, 1.1, 0.02), (16, 1.3, 0.03)]
    for width in WIDTHS
}
"""Milliseconds, such that wide steps pay alone and not in company."""


def constant(rate: float) -> Survival:
    """Each draft is accepted at this rate once those before it were."""
    return Survival(tuple(rate**place for place in range(1, 16)))


def test_expected_tokens():
    assert expected_tokens(Survival((0.5, 0.25, 0.0)), 1) == 1
    assert expected_tokens(Survival((0.5, 0.25, 0.0)), 3) == 1.75
    assert expected_tokens(Survival((0.5, 0.9, 0.9)), 4) == 2.5, "places seen long ago"
    assert expected_tokens(NOTHING, 16) == 1


def test_only_verified_places_are_judged():
    survival = after_step(Survival((0.5, 0.5, 0.5), seen=99), num_drafts=2, accepted=1)
    assert survival.shares == pytest.approx((0.515, 0.485, 0.5))
    assert survival.seen == 100


def test_the_first_steps_weigh_more():
    survival = Survival((0.8,))
    for _ in range(12):
        survival = after_step(survival, num_drafts=1, accepted=0)
    assert survival.shares[0] == pytest.approx(0.8 * 4 / 16)


@pytest.mark.parametrize(
    ("rows", "rate", "width"), [(1, 0.95, 16), (1, 0.0, 1), (16, 0.3, 1), (16, 0.8, 4)]
)
def test_widths_follow_acceptance_and_cost(rows, rate, width):
    assert choose_width(rows, [constant(rate)] * rows, COSTS, current=8) == width


def test_one_that_is_barely_better_is_not_taken():
    costs = {(1, 1): 1.0, (1, 4): 1.0}
    barely, clearly = Survival((0.02, 0.0, 0.0)), Survival((0.05, 0.0, 0.0))
    assert choose_width(1, [barely], costs, current=1) == 1
    assert choose_width(1, [clearly], costs, current=1) == 4
    assert choose_width(1, [barely], costs, current=4) == 4


def test_requests_that_do_not_speculate_weigh_for_narrow_steps():
    good = constant(0.8)
    assert choose_width(4, [good] * 4, COSTS, 1) > choose_width(4, [good] + [NOTHING] * 3, COSTS, 1)


@dataclasses.dataclass(frozen=True)
class Phase:
    rows: int
    rate: float
    steps: int = 1500


TRACE = [
    Phase(1, 0.9),
    Phase(16, 0.9),
    Phase(16, 0.2),
    Phase(1, 0.2),
    Phase(4, 0.8),
    Phase(1, 0.95),
]


def tokens_per_ms(phase: Phase, width_of, told, random) -> float:
    """Steps of requests whose drafts are accepted by chance; counted by what was to be expected."""
    tokens = time = 0.0
    for _ in range(phase.steps):
        width = width_of(phase.rows)
        time += COSTS[phase.rows, width]
        for request in range(phase.rows):
            hits = random.random(width - 1) < phase.rate
            accepted = int(np.cumprod(hits).sum())
            tokens += expected_tokens(constant(phase.rate), width)
            told(request, width - 1, accepted)
    return tokens / time


@pytest.mark.parametrize("seed", [0, 1])
def test_it_keeps_up_with_the_best_fixed_width_in_every_phase(seed):
    random = np.random.default_rng(seed)
    spans = AdaptiveSpans(COSTS)
    for phase in TRACE:
        adaptive = tokens_per_ms(
            phase,
            lambda rows: spans.width(rows, list(range(rows))),
            lambda request, drafts, accepted: spans.commit(request, (), drafts, accepted),
            random,
        )
        exact = {
            width: phase.rows
            * expected_tokens(constant(phase.rate), width)
            / COSTS[phase.rows, width]
            for width in WIDTHS
        }
        assert adaptive > 0.97 * max(exact.values()), (phase, exact)


def test_it_tries_again_where_nothing_is_drafted():
    spans = AdaptiveSpans(COSTS)
    spans.commit(0, ())
    seen = []
    for _ in range(400):
        seen.append(spans.width(1, [0]))
        spans.commit(0, (), seen[-1] - 1, 0)
    assert seen[0] == 16 and set(seen[-300:]) == {1, 4}
    assert seen[-300:].count(4) <= 48, "three tries"


PRICES = {
    "wide": lambda width: 1.0,
    "narrow": lambda width: 1.0 + 0.2 * width,
    "plain": lambda width: 1.0 + 9.0 * (width > 1),
}


@pytest.mark.parametrize("prices", PRICES)
@pytest.mark.parametrize("driver", ["lockstep", "overlapped"])
def test_tokens_are_those_of_plain_decoding(prices, driver):
    engine = golden_engine()
    loop = engine.loop
    tiers = (1, 4, loop.plan.width)
    loop.plan = dataclasses.replace(loop.plan, tiers=tiers, driver=driver)
    loop.spans = AdaptiveSpans({(4, width): PRICES[prices](width) for width in tiers})
    cases = trajectories()[1:7]
    params = [budget(30, speculate=i != 1) for i in range(6)]
    outputs = engine.generate([case["prompt"] for case in cases], params)
    for output, case in zip(outputs, cases):
        assert list(output.token_ids) == case["greedy"][:30]
    drafted = sum(output.stats.num_draft_tokens for output in outputs)
    steps = sum(output.stats.num_spec_steps for output in outputs)
    assert outputs[1].stats.num_draft_tokens == 0
    if prices == "wide":
        assert drafted == 7 * steps
    elif prices == "plain":
        assert steps <= 20, "a few steps of five requests, and no more"
    assert not loop.spans.survivals, "all were released"


def test_a_table_is_measured_and_a_drafter_of_noise_is_not_asked():
    options = dict(adaptive=True, max_batch=1, max_model_len=160, shapes=None)
    engine = golden_engine(params=noisy_drafter(), **options)
    plan = engine.loop.plan
    assert plan.tiers == (1, 4, 8)
    assert set(engine.loop.spans.costs) == {(1, 1), (1, 4), (1, 8)}
    assert all(seconds > 0 for seconds in engine.loop.spans.costs.values())
    engine.loop.spans.costs = {(1, width): 1.0 + 0.1 * width for width in plan.tiers}
    case = trajectories()[2]
    for params in (budget(60), budget(20, temperature=0.8, seed=1)):
        output = engine.generate(case["prompt"], params)
        if not params.temperature:
            assert list(output.token_ids) == case["greedy"][:60]
    assert engine.loop.spans.current == 1, "drafts that are never right are not made"
    assert engine.plain().generate(case["prompt"], budget(9)).error is None


def test_not_with_exact():
    with pytest.raises(UsageError, match="exact has one"):
        EngineOptions(adaptive=True, exact=True)
