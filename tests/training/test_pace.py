"""Runs by their steps and runs by the clock end annealed."""

import itertools
import json
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from training_toys import counting_rows, toy_objective, toy_params

from jaxspec.training import pace
from jaxspec.training.loop import train
from jaxspec.training.optimization import learning_rate
from jaxspec.training.pace import Lead, turns
from jaxspec.training.recipe import Cadence, Optimization, Recipe

TIMED = Optimization(seconds=10.0, learning_rate=0.5, warmup=0.1)


@pytest.fixture
def clock(monkeypatch):
    """A clock that somebody has to move."""
    now = [100.0]
    monkeypatch.setattr(pace, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_by_steps_progress_follows_from_the_step():
    options = Optimization(steps=4)
    assert list(turns(options, 0)) == [(1, 0.0), (2, 0.25), (3, 0.5), (4, 0.75)]
    assert list(turns(options, 2)) == [(3, 0.5), (4, 0.75)]


def test_by_the_clock_compiling_shortens_the_run_and_not_the_warm_up(clock):
    some = []
    for done, progress in turns(TIMED, 0):
        some.append((done, round(progress, 3)))
        clock[0] += 6.0 if done == 1 else 1.0
    assert some == [(1, 0.0), (2, 0.0), (3, 0.25), (4, 0.5), (5, 0.75)]


def test_the_learning_rate_rises_in_a_line_and_ends_at_zero():
    rates = [float(learning_rate(TIMED, jnp.float32(x))) for x in (0.0, 0.05, 0.1, 0.55, 1.0)]
    np.testing.assert_allclose(rates, [0.0, 0.25, 0.5, 0.25, 0.0], atol=1e-6)


def test_the_host_stays_a_few_steps_ahead(clock, monkeypatch):
    waited_for = []

    def wait(result):
        waited_for.append(result)
        clock[0] += 1.0

    monkeypatch.setattr(pace.jax, "block_until_ready", wait)
    lead = Lead()
    for number in range(pace.STEPS_AHEAD + 2):
        lead.launched(number)
    clock[0] += 2.0
    assert waited_for == [0, 1] and lead.share_waited() == 0.5
    assert lead.share_waited() == 0.0


def test_a_timed_run_learns_until_its_time_is_up(tmp_path, monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(pace, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    objective = toy_objective(Recipe(anchors=4))
    params, frozen = toy_params(objective)
    options = Optimization(seconds=30.0, batch_size=4, learning_rate=1e-2, compute="float32")
    learned = train(objective, params, frozen, counting_rows(), options, Cadence(5), tmp_path)
    steps = [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert steps[0] == 5 and 5 < steps[-1] < 30
    assert not (tmp_path / "states").exists()
    assert np.all(learned["feature_projection"]["kernel"] != params["feature_projection"]["kernel"])
