"""Tokens shared out among requests that accept different numbers of drafts: simulated speeds."""

import importlib
import pathlib
import sys
from typing import Any

import pytest

STEEP = {
    (8, 1): 6.1, (8, 4): 7.0, (8, 8): 7.9, (8, 16): 9.3,
    (16, 1): 6.6, (16, 4): 8.2, (16, 8): 9.3, (16, 16): 12.0,
    (32, 1): 7.0, (32, 4): 9.5, (32, 8): 11.5, (32, 16): 16.3,
}  # fmt: skip
"""Milliseconds of steps that get longer with every token more than those of 8B on an H100 do."""
SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(scope="module")
def budget():
    """The calculation, which has the simulated loads."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        yield importlib.import_module("verify_budget")
    finally:
        sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="module")
def times(budget):
    """Of 8B on an H100."""
    return budget.least_times(budget.timed("steps-8b-h100"))


def equal(budget: Any, times: Any, batch: int, lengths: tuple[float, float]) -> dict[int, float]:
    widths = (width for size, width in times if size == batch)
    return {width: budget.fixed(batch, lengths, width, times) for width in widths}


GSM8K, MT_BENCH = 6.54, 4.24


@pytest.mark.parametrize(
    ("batch", "lengths", "of_16", "of_best"),
    [
        (8, (GSM8K, MT_BENCH), 0.98, 0.98),
        (16, (GSM8K, MT_BENCH), 0.98, 0.98),
        (32, (GSM8K, MT_BENCH), 1.1, 0.99),
        (32, (6.4, 3.0), 1.17, 1.02),
    ],
)
def test_half_of_the_requests_accept_more(budget, times, batch, lengths, of_16, of_best):
    assert_shared_pays(budget, times, batch, lengths, of_16, of_best)


@pytest.mark.parametrize(
    ("batch", "lengths", "of_16", "of_best"),
    [
        (8, (6.4, 3.0), 0.97, 0.97),
        (16, (6.4, 3.0), 1.1, 1.04),
        (32, (6.4, 3.0), 1.2, 1.03),
        (8, (GSM8K, MT_BENCH), 0.97, 0.97),
        (16, (GSM8K, MT_BENCH), 1.04, 0.99),
        (32, (GSM8K, MT_BENCH), 1.14, 0.99),
    ],
)
def test_the_same_where_tokens_cost_more(budget, batch, lengths, of_16, of_best):
    assert_shared_pays(budget, STEEP, batch, lengths, of_16, of_best)


def assert_shared_pays(budget, times, batch, lengths, of_16, of_best) -> None:
    fixed = equal(budget, times, batch, lengths)
    speed = budget.shared(batch, lengths, times)
    assert speed > of_16 * fixed[16]
    assert speed > of_best * max(fixed.values())


@pytest.mark.parametrize(
    ("steep", "loads"), [(False, [(8, 6.5), (32, 7.9)]), (True, [(32, 6.5), (16, 3.0)])]
)
def test_equal_requests_lose_little(budget, times, steep, loads):
    given = STEEP if steep else times
    for batch, length in loads:
        lengths = length, length
        best = max(equal(budget, given, batch, lengths).values())
        assert budget.shared(batch, lengths, given) > 0.97 * best


@pytest.mark.parametrize("steep", [False, True])
def test_where_no_draft_is_accepted_nothing_is_drafted_for_long(budget, times, steep):
    given, lengths = STEEP if steep else times, (1.1, 1.1)
    plain = budget.fixed(32, lengths, 1, given)
    assert budget.shared(32, lengths, given) > 0.93 * plain


def test_the_most_that_any_policy_can_give(budget, times):
    """By hand for two requests with 4 tokens to verify; and what the notes conclude."""
    high, low = (budget.from_length(one, 15).conditional_rates[0] for one in (GSM8K, MT_BENCH))
    assert budget.best_tokens(2, 4) == pytest.approx(2 + high + max(high**2, low))
    assert budget.best_tokens(2, 32) == pytest.approx(GSM8K + MT_BENCH)
    rows = {row["verified"]: row for row in budget.rows_of(32, times)}
    assert rows[256]["least_ms"] > rows[256]["longest_ms"]
    assert rows[512]["of_whole_blocks"] == pytest.approx(1)
    assert max(row.get("of_whole_blocks", 0) for row in rows.values()) < 1.15
    for batch in (8, 16):
        assert all(row.get("of_whole_blocks", 0) <= 1 for row in budget.rows_of(batch, times))
