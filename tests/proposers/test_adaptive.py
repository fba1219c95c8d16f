"""Adaptive width: it follows acceptance and cost, and no token depends on it."""

import dataclasses

import numpy as np
import pytest
from golden_pair import budget, golden_engine, noisy_drafter, trajectories

from jaxspec.acceptance.synthetic import from_length
from jaxspec.engine.adapt.acceptance_rates import (
    DRIFT_RATE,
    expected_tokens,
    initial_rates,
    recent_rates,
    updated_rates,
)
from jaxspec.engine.adapt.even import Even
from jaxspec.engine.adapt.loop_costs import Costs, LoopCosts
from jaxspec.engine.adapt.width import AdaptiveWidth, choose_width
from jaxspec.engine.plan.options import EngineOptions
from jaxspec.errors import UsageError

WIDTHS = (1, 4, 8, 16)
COSTS = {
    (4, 1): 6.4, (4, 4): 7.65, (4, 8): 7.7, (4, 16): 7.9,
    (32, 1): 7.4, (32, 4): 9.0, (32, 8): 10.5, (32, 16): 15.0,
}  # fmt: skip
"""Milliseconds, such that wide steps pay in small batches and not in large ones."""


def constant(rate: float) -> tuple[float, ...]:
    """Each draft is accepted at this rate once those before it were."""
    return (rate,) * 15


def test_expected_tokens():
    assert expected_tokens((0.5, 0.5, 0.0), 1) == 1
    assert expected_tokens((0.5, 0.5, 0.0), 3) == 1.75
    assert expected_tokens((0.5, 0.5, 0.0), 4) == 1.75
    assert expected_tokens((), 16) == 1


def test_recent_rates_count_the_drafts_that_were_reached():
    """By hand: the first draft was reached 4 times and kept 3, the second 3 and 1, the third 1."""
    outcomes = [(3, 0), (3, 1), (2, 1), (3, 3)]
    rates = recent_rates(outcomes, (0.5, 0.5, 0.5, 0.9))
    assert rates == pytest.approx(((3 + 1) / 6, (1 + 1) / 5, (1 + 1) / 3, 0.9))
    assert recent_rates([], initial_rates(2)) == initial_rates(2) == (0.8, 0.8)


def test_the_long_run_rates_learn_and_what_is_not_verified_follows():
    long_run = (0.5, 0.5, 0.2, 0.1)
    same = updated_rates(long_run, (0.5, 0.5, 0.2, 0.1), verified=2)
    assert same == pytest.approx((0.5, 0.5, 0.2 + DRIFT_RATE * 0.3, 0.1 + DRIFT_RATE * 0.4))
    changed = updated_rates(long_run, (0.9, 0.9, 0.2, 0.1), verified=2)
    assert changed[:2] == pytest.approx((0.54, 0.54))
    assert changed[2] == pytest.approx(0.2 + (DRIFT_RATE + 0.4) * 0.7), "another text: soon"
    assert updated_rates(long_run, (0.9,) * 4, verified=0) == long_run
    assert updated_rates(long_run, long_run, verified=4) == pytest.approx(long_run)


@pytest.mark.parametrize(
    ("batch", "rate", "width"), [(4, 0.95, 16), (4, 0.0, 1), (32, 0.1, 1), (32, 0.8, 8)]
)
def test_widths_follow_acceptance_and_cost(batch, rate, width):
    assert choose_width(batch, batch, 0, constant(rate), COSTS, current=4) == width


def test_one_that_is_barely_better_is_not_taken():
    costs = {(1, 1): 1.0, (1, 4): 1.0}
    barely, clearly = (0.01, 0.0, 0.0), (0.05, 0.0, 0.0)
    assert choose_width(1, 1, 0, barely, costs, current=1) == 1
    assert choose_width(1, 1, 0, clearly, costs, current=1) == 4
    assert choose_width(1, 1, 0, barely, costs, current=4) == 4


def test_requests_that_do_not_speculate_weigh_for_narrow_steps():
    rates = constant(0.8)
    assert choose_width(32, 32, 0, rates, COSTS, 1) > choose_width(32, 3, 29, rates, COSTS, 1)


LIKE_4B = {
    (1, 1): 3.6, (1, 4): 4.5, (1, 8): 4.6, (1, 16): 4.8,
    (4, 1): 3.84, (4, 4): 4.86, (4, 8): 4.94, (4, 16): 5.17,
    (32, 1): 4.0, (32, 4): 6.18, (32, 8): 7.1, (32, 16): 9.28,
}  # fmt: skip
LIKE_8B = {
    (1, 1): 5.6, (1, 4): 5.9, (1, 8): 6.4, (1, 16): 7.2,
    (4, 1): 5.9, (4, 4): 6.2, (4, 8): 7.0, (4, 16): 8.1,
    (32, 1): 7.0, (32, 4): 9.5, (32, 8): 11.5, (32, 16): 16.3,
}  # fmt: skip
"""Milliseconds of steps on an H100, about."""
BAR, RISING = 0.97, 0.95
"""Shares of the best fixed width's rate; a rise at the same batch size is noticed only at the next
trial."""
TRACE = [
    (4, 6.5, BAR), (4, 1.15, BAR), (32, 6.5, BAR), (32, 1.3, BAR), (4, 4.24, BAR), (32, 7.87, BAR),
    (32, 1.3, BAR), (32, 6.5, RISING), (4, 1.15, BAR), (4, 6.5, RISING), (1, 1.2, BAR),
    (1, 5.0, RISING),
]  # fmt: skip
"""Requests at once, the mean acceptance length of a whole block, and the least share; begins as
bench_spans.py does."""


class Requests:
    """Requests that come and go; their results are read a step late."""

    def __init__(self, costs: Costs, seed: int):
        self.costs, self.adaptive = costs, AdaptiveWidth(costs)
        self.random = np.random.default_rng(seed)
        self.left: dict[int, int] = {}
        self.flying: list[tuple[int, int, int]] = []
        self.submitted = 0

    def share_of_the_best(self, batch: int, length: float, steps: int = 500) -> float:
        """Tokens per second of a phase over those of the best fixed width; tokens are expected
        values, from the first step on."""
        rates = from_length(length, 15).conditional_rates
        gives = {width: expected_tokens(rates, width) for width in WIDTHS}
        time = tokens = 0.0
        for _ in range(steps):
            self.come_and_go(batch)
            width = self.adaptive.width(batch, list(self.left))
            time += self.costs[batch, width]
            tokens += gives[width]
            self.step(rates[0], width - 1)
        return tokens / time / max(gives[width] / self.costs[batch, width] for width in WIDTHS)

    def come_and_go(self, batch: int) -> None:
        ended = [id for id, left in self.left.items() if left <= 0]
        for request in ended + list(self.left)[batch:]:
            if self.left.pop(request, None) is not None:
                self.adaptive.release(request)
        while len(self.left) < batch:
            self.submitted += 1
            self.left[self.submitted] = int(self.random.integers(200, 900))
            self.adaptive.commit(self.submitted, ())

    def step(self, rate: float, drafts: int) -> None:
        landing, self.flying = self.flying, []
        kept = np.cumprod(self.random.random((len(self.left), drafts)) < rate, axis=1)
        for request, accepted in zip(self.left, kept.sum(axis=1).tolist()):
            self.flying.append((request, drafts, accepted))
        for request, drafts, accepted in landing:
            if request in self.left:
                self.adaptive.commit(request, (), drafts, accepted)
                self.left[request] -= accepted + 1


@pytest.mark.parametrize(("costs", "seed"), [(LIKE_4B, 0), (LIKE_8B, 1)], ids=["4b", "8b"])
def test_it_keeps_up_with_the_best_fixed_width_in_every_phase(costs, seed):
    run = Requests(costs, seed)
    for batch, length, least in TRACE:
        share = run.share_of_the_best(batch, length)
        assert share > least, (batch, length, share)
    assert set(run.adaptive.outcomes) == set(run.left)


def test_it_tries_again_while_nothing_is_drafted():
    adaptive = AdaptiveWidth(COSTS)
    widths = []
    for _ in range(400):
        for request in range(4):
            adaptive.commit(request, (), widths[-1] - 1 if widths else 0, 0)
        widths.append(adaptive.width(4, range(4)))
    late = widths[-200:]
    assert widths[0] == 16 and set(late) == {1, 4}
    lost = sum(COSTS[4, width] for width in late) / (200 * COSTS[4, 1]) - 1
    assert 0 < lost < 0.015, "tries cost about one percent"


def test_another_batch_size_is_a_reason_to_try():
    adaptive = AdaptiveWidth(COSTS)
    chosen = []
    for _ in range(100):
        for request in range(32):
            adaptive.commit(request, (), 15, 0)
        chosen.append(adaptive.width(32, range(32)))
    assert chosen[-1] == 1
    widths = [adaptive.width(4, range(4)) for _ in range(4)]
    assert widths == [4, 1, 1, 1]


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
    widths = (1, 4, loop.plan.width)
    loop.plan = dataclasses.replace(loop.plan, widths=widths, driver=driver)
    adaptive = AdaptiveWidth({(4, width): PRICES[prices](width) for width in widths})
    loop.drafters.adaptive = adaptive
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
    assert not adaptive.outcomes, "all were released"


def test_a_table_is_measured_and_a_drafter_of_noise_is_not_asked():
    engine = golden_engine(params=noisy_drafter(), adaptive=True)
    plan = engine.loop.plan
    assert plan.widths == (1, 4, 8)
    assert set(engine.loop.drafters.adaptive.costs) == {
        (4, 1),
        (4, 4),
        (4, Even(4)),
        (4, 8),
    }
    assert all(seconds > 0 for seconds in engine.loop.drafters.adaptive.costs.values())
    known = {(4, width): 1.0 + 0.1 * width for width in plan.widths}
    engine.loop.drafters.adaptive.of_loop = LoopCosts(known)
    case = trajectories()[2]
    for params in (budget(60), budget(20, temperature=0.8, seed=1)):
        output = engine.generate(case["prompt"], params)
        if not params.temperature:
            assert list(output.token_ids) == case["greedy"][:60]
    assert engine.loop.drafters.adaptive.current == 1, "drafts that are never right are not made"
    assert engine.plain().generate(case["prompt"], budget(9)).error is None


def test_not_with_exact():
    with pytest.raises(UsageError, match="exact has one"):
        EngineOptions(adaptive=True, exact=True)
