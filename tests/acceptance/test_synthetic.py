"""Synthetic acceptance: the rates that were asked for, the same every time."""

import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from jaxspec.acceptance.synthetic import MixedAcceptance, draw_accepted, from_length, from_rates
from jaxspec.engine.plan.options import EngineOptions
from jaxspec.engine.plan.planning import choose_driver, synthetic_of
from jaxspec.errors import UsageError

BATCH = 20000


def drawn(synthetic, num_drafts, seed=3):
    lengths = jnp.arange(BATCH, dtype=jnp.int32)
    seeds = jnp.full(BATCH, seed, jnp.uint32)
    drafted = jnp.full(BATCH, num_drafts)
    return np.asarray(draw_accepted(jnp.asarray(synthetic.rates), seeds, lengths, drafted))


@pytest.mark.parametrize("length", [1.0, 2.5, 4.0, 5.0])
def test_the_mean_length_asked_for(length):
    assert from_length(length, 4).mean_length == pytest.approx(length)
    assert drawn(from_length(length, 4), 4).mean() + 1 == pytest.approx(length, abs=0.05)


def test_the_rates_asked_for():
    accepted = drawn(from_rates((0.8, 0.5, 0.5), 4), 4)
    rates = [(accepted >= place).mean() for place in (1, 2, 3, 4)]
    assert rates == pytest.approx([0.8, 0.5, 0.5, 0.0], abs=0.02)


def test_kinds_of_requests_take_turns_by_seed():
    mixed = MixedAcceptance((from_length(4.0, 4), from_length(1.5, 4)))
    assert mixed.mean_length == pytest.approx(2.75)
    for seed, length in ((2, 4.0), (3, 1.5)):
        assert drawn(mixed, 4, seed).mean() + 1 == pytest.approx(length, abs=0.05)
        assert (drawn(mixed, 4, seed) == drawn(from_length(length, 4), 4, seed)).all()


def test_no_more_than_was_drafted_and_the_same_again():
    always = from_rates((1, 1, 1, 1), 4)
    assert (drawn(always, 2) == 2).all()
    half = from_length(2.0, 4)
    assert (drawn(half, 4) == drawn(half, 4)).all()
    assert (drawn(half, 4) != drawn(half, 4, seed=4)).any()


@pytest.mark.parametrize("acceptance", [0.5, 5.1, (), (0.5, 0.6), (1.2,), (0.5,) * 5])
def test_what_cannot_be_drawn_is_refused(acceptance):
    with pytest.raises(UsageError, match="synthetic acceptance"):
        synthetic_of(acceptance, 4)


def test_it_is_drawn_on_the_device():
    assert choose_driver(EngineOptions(synthetic_acceptance=3)) == "overlapped"
    with pytest.raises(UsageError, match="lockstep accepts on the host"):
        EngineOptions(synthetic_acceptance=3, driver="lockstep")


def test_rates_and_kinds_of_requests_are_not_mixed(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as users run it
    with pytest.raises(UsageError, match="expected either rates or tuples of rates"):
        synthetic_of((0.5, (0.2,)), 4)  # pyright: ignore[reportArgumentType]
