"""Tokens shared out among requests that accept different numbers of drafts: simulated speeds."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.acceptance.outcomes import after_step, survival
from jaxspec.acceptance.shares import shared_out
from jaxspec.acceptance.synthetic import from_length
from jaxspec.engine.adapt.width import AdaptiveWidth

LIKE_8B = {
    (8, 1): 6.1, (8, 4): 7.0, (8, 8): 7.9, (8, 16): 9.3,
    (16, 1): 6.6, (16, 4): 8.2, (16, 8): 9.3, (16, 16): 12.0,
    (32, 1): 7.0, (32, 4): 9.5, (32, 8): 11.5, (32, 16): 16.3,
}  # fmt: skip
"""Milliseconds of steps on an H100, about."""
DRAFTS, STEPS = 15, 300


class Load:
    """Requests of two kinds, which go on for ever."""

    def __init__(self, batch: int, lengths: tuple[float, float]):
        self.batch = batch
        kinds = [from_length(length, DRAFTS).conditional_rates for length in lengths]
        self.rates = np.array([kinds[request % 2] for request in range(batch)])
        self.random = np.random.default_rng(0)
        self.milliseconds, self.tokens = 0.0, 0

    def step(self, width: int, num_drafts: np.ndarray) -> np.ndarray:
        """How many drafts are accepted of each request."""
        right = np.cumprod(self.random.random(self.rates.shape) < self.rates, axis=1).sum(axis=1)
        accepted = np.minimum(right, num_drafts)
        self.milliseconds += LIKE_8B[self.batch, width]
        self.tokens += int(accepted.sum()) + self.batch
        return accepted

    @property
    def speed(self) -> float:
        return self.tokens / self.milliseconds


def fixed(batch: int, lengths: tuple[float, float], width: int) -> float:
    load = Load(batch, lengths)
    for _ in range(STEPS):
        load.step(width, np.full(batch, width - 1))
    return load.speed


def shared(batch: int, lengths: tuple[float, float]) -> float:
    """The host chooses the width with results of the step before the last; the device shares."""
    load, adaptive = Load(batch, lengths), AdaptiveWidth(LIKE_8B, shares_tokens=True)
    tried = kept = np.zeros((batch, DRAFTS), np.float32)
    late: list[tuple[np.ndarray, np.ndarray]] = []
    for request in range(batch):
        adaptive.commit(request, ())
    for _ in range(STEPS):
        width = adaptive.width(batch, range(batch))
        num_drafts = np.full(batch, DRAFTS if width > 1 else 0)
        if 1 < width < DRAFTS + 1:
            chances = jnp.asarray(survival(tried, kept))
            budget = jnp.array(batch * (width - 1))
            num_drafts = np.asarray(shared_out(chances, jnp.asarray(num_drafts), budget))
        accepted = load.step(width, num_drafts)
        tried, kept = after_step(tried, kept, num_drafts, accepted)
        late.append((num_drafts, accepted))
        if len(late) > 1:
            for request, (drafts, right) in enumerate(zip(*map(np.ndarray.tolist, late.pop(0)))):
                adaptive.commit(request, (), drafts, right)
    return load.speed


GSM8K, MT_BENCH = 6.54, 4.24


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
def test_half_of_the_requests_accept_more(batch, lengths, of_16, of_best):
    equal = {width: fixed(batch, lengths, width) for width in (1, 4, 8, 16)}
    speed = shared(batch, lengths)
    assert speed > of_16 * equal[16]
    assert speed > of_best * max(equal.values())


def test_equal_requests_lose_little():
    for batch, length in ((8, 6.5), (32, 7.9), (32, 6.5), (16, 3.0)):
        lengths = length, length
        best = max(fixed(batch, lengths, width) for width in (1, 4, 8, 16))
        assert shared(batch, lengths) > 0.97 * best


def test_where_no_draft_is_accepted_nothing_is_drafted_for_long():
    assert shared(32, (1.1, 1.1)) > 0.93 * fixed(32, (1.1, 1.1), 1)
