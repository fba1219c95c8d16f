"""The costs of steps follow what the loop's steps take, so that a bias of the first ones passes."""

import numpy as np
import pytest

from jaxspec.acceptance.synthetic import from_length
from jaxspec.engine.adapt.loop_costs import LoopCosts
from jaxspec.engine.adapt.step_times import StepTimes
from jaxspec.engine.adapt.width import AdaptiveWidth

MEASURED = {(32, 1): 5.9, (32, 4): 9.5, (32, 8): 10.8, (32, 16): 13.8}
"""Milliseconds of steps with empty contexts on a cool H100, about."""
IN_LOOP = {1: 6.5, 4: 10.3, 8: 11.9, 16: 16.4}


def test_a_cost_follows_the_loop_and_forgets_slowly():
    costs = LoopCosts(MEASURED)
    for _ in range(60):
        costs.timed((32, 16), 16.4)
    assert costs.costs[32, 16] == pytest.approx(16.4, rel=0.01)
    assert costs.costs[32, 8] == pytest.approx(10.8)
    for _ in range(350):
        costs.timed((32, 8), 11.9)
    assert costs.costs[32, 8] == pytest.approx(11.9, rel=0.01)
    assert costs.costs[32, 16] == pytest.approx((13.8 + 16.4) / 2, rel=0.01)


def test_what_is_no_time_of_such_a_step_changes_nothing():
    costs = LoopCosts(MEASURED)
    costs.timed((32, 16), 5000.0)
    costs.timed((32, 16), 0.01)
    costs.timed((16, 16), 10.0)
    assert costs.costs == MEASURED
    costs.timed((32, 16), 40.0)
    assert costs.costs[32, 16] < 1.021 * MEASURED[32, 16], "one disturbed step changes little"


def chosen_widths(adaptive: AdaptiveWidth, length: float, steps: int) -> list[int]:
    """Widths of steps of 32 requests whose whole blocks would have this mean acceptance length."""
    random, [rate, *_] = np.random.default_rng(0), from_length(length, 15).conditional_rates
    for request in range(32):
        adaptive.commit(request, [1])
    widths, now = [], 0.0
    for _ in range(steps):
        widths.append(width := adaptive.width(32, range(32)))
        now += IN_LOOP[width]
        adaptive.note_time((32, width), asked=now - 1, came=now, another_was_launched=True)
        for request in range(32):
            accepted = int(np.argmax([*(random.random(width - 1) >= rate), True]))
            adaptive.commit(request, [1], width - 1, accepted)
    return widths


def test_the_width_that_the_measured_costs_miss_is_found():
    """At 6.54 whole blocks give 1.31 times the tokens of width 8 and take 1.38 times as long, but
    1.28 times by the measured costs."""
    learned, fixed = (
        chosen_widths(AdaptiveWidth(MEASURED, learns_costs=learns), 6.54, 1000)[100:]
        for learns in (True, False)
    )
    assert learned.count(8) > 0.9 * len(learned)
    assert fixed.count(8) < 0.6 * len(fixed)


@pytest.mark.parametrize(("length", "width"), [(4.24, 8), (9.5, 16)])
def test_the_right_width_stays(length, width):
    widths = chosen_widths(AdaptiveWidth(MEASURED), length, 1000)[100:]
    assert widths.count(width) > 0.9 * len(widths)


def test_steps_are_timed_between_two_results_that_the_host_waited_for():
    times = StepTimes()
    assert times.took(asked=1.0, came=2.0, another=True) is None, "its beginning is not known"
    assert times.took(asked=2.5, came=4.0, another=True) == 2.0
    assert times.took(asked=9.0, came=9.0, another=True) is None, "it had ended before"
    assert times.took(asked=9.5, came=11.0, another=True) is None, "it was idle before"
    assert times.took(asked=11.0, came=12.0, another=False) == 1.0
    assert times.took(asked=13.0, came=15.0, another=True) is None, "it was launched later"
