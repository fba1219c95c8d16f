"""A run counted in steps or in seconds ends with a learning rate of zero."""

import itertools
import json
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from training_toys import counting_sequences, toy_objective, toy_params

from jaxspec.training import in_flight, progress
from jaxspec.training.in_flight import StepsInFlight
from jaxspec.training.loop import train
from jaxspec.training.optimizer import learning_rate
from jaxspec.training.progress import steps_with_progress
from jaxspec.training.recipe import Cadence, Optimization, Recipe

TIMED = Optimization(seconds=10.0, learning_rate=0.5, warmup=0.1)


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the test moves."""
    now = [100.0]
    for module in progress, in_flight:
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_by_steps_progress_follows_from_the_step():
    options = Optimization(steps=4)
    assert list(steps_with_progress(options, 0)) == [(1, 0.0), (2, 0.25), (3, 0.5), (4, 0.75)]
    assert list(steps_with_progress(options, 2)) == [(3, 0.5), (4, 0.75)]


def test_by_the_clock_compiling_shortens_the_run_and_not_the_warm_up(clock):
    some = []
    for step, share in steps_with_progress(TIMED, 0):
        some.append((step, round(share, 3)))
        clock[0] += 6.0 if step == 1 else 1.0
    assert some == [(1, 0.0), (2, 0.0), (3, 0.25), (4, 0.5), (5, 0.75)]


def test_the_learning_rate_rises_in_a_line_and_ends_at_zero():
    rates = [float(learning_rate(TIMED, jnp.float32(x))) for x in (0.0, 0.05, 0.1, 0.55, 1.0)]
    np.testing.assert_allclose(rates, [0.0, 0.25, 0.5, 0.25, 0.0], atol=1e-6)


def test_the_host_stays_a_few_steps_ahead(clock, monkeypatch):
    waited_for = []

    def wait(result):
        waited_for.append(result)
        clock[0] += 1.0

    monkeypatch.setattr(in_flight.jax, "block_until_ready", wait)
    launched = StepsInFlight()
    for number in range(in_flight.STEPS_AHEAD + 2):
        launched.add(number)
    clock[0] += 2.0
    assert waited_for == [0, 1] and launched.share_waited() == 0.5
    assert launched.share_waited() == 0.0


def test_a_timed_run_learns_until_its_time_is_up(tmp_path, monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    objective = toy_objective(Recipe(anchors=4))
    params, frozen = toy_params(objective)
    options = Optimization(seconds=30.0, batch_size=4, learning_rate=1e-2, compute="float32")
    learned = train(objective, params, frozen, counting_sequences(), options, Cadence(5), tmp_path)
    steps = [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert steps[0] == 5 and 5 < steps[-1] < 30
    assert not (tmp_path / "states").exists()
    assert np.all(learned["feature_projection"]["kernel"] != params["feature_projection"]["kernel"])
