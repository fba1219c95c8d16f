"""A run stops at numbers that are not finite, and neither saves nor reports them."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import EVERY_STEP, OPTIONS, losses, objective, run_small, sequences
from training_toys import counting_sequences, toy_objective, toy_params, toy_target

from jaxspec.errors import LoadError
from jaxspec.training.objective import TargetObjective, to_device
from jaxspec.training.recipe import Cadence, Recipe
from jaxspec.training.snapshots import NoSnapshots, Snapshots
from jaxspec.training.train_step import first_state

BAD_SEQUENCE = 7
"""Index of a sequence that makes the loss or the gradient of its step not finite."""
TOKEN = sequences().tokens[BAD_SEQUENCE, 0]
BAD_STEP = 1 + next(
    step for step in range(OPTIONS.steps) if TOKEN in sequences().batch_of_step(step, 2, 0).tokens
)
SELDOM = Cadence(log_every=1000, checkpoint_minutes=60.0)


def is_bad(batch):
    return jnp.any(batch.tokens == TOKEN)


def loss_not_finite(trainable, frozen, batch, key):
    """The gradient stays finite, so that only the loss can tell."""
    loss, _ = objective(trainable, frozen, batch, key)
    loss += jax.lax.stop_gradient(jnp.where(is_bad(batch), jnp.inf, 0.0))
    return loss, {"loss": loss}


def gradient_not_finite(trainable, frozen, batch, key):
    """The loss stays finite, so that only the gradient can tell."""
    loss, metrics = objective(trainable, frozen, batch, key)
    zero = jnp.sum(trainable["matrix"]) * 0.0
    return loss + jnp.sqrt(zero + jnp.where(is_bad(batch), 0.0, 1.0)), metrics


@pytest.mark.parametrize("cadence", [EVERY_STEP, replace(EVERY_STEP, log_every=1000), SELDOM])
@pytest.mark.parametrize(
    "broken, found",
    [(loss_not_finite, "loss is inf"), (gradient_not_finite, "gradient_norm is nan")],
    ids=["loss", "gradient"],
)
def test_the_first_bad_step_ends_the_run_and_is_not_saved(tmp_path, broken, found, cadence):
    assert 1 < BAD_STEP < OPTIONS.steps
    with pytest.raises(LoadError, match=f"stopped at step {BAD_STEP}: {found}.*weights") as caught:
        run_small(tmp_path, cadence, objective=broken)
    assert "\n" not in str(caught.value)
    latest = Snapshots(tmp_path / "states").latest
    assert latest == (None if cadence is SELDOM else BAD_STEP - 1)
    assert [step for step, *_ in losses(tmp_path)] == (
        list(range(1, BAD_STEP)) if cadence is EVERY_STEP else []
    )


def test_parameters_that_overflow_end_the_run_although_loss_and_gradient_are_finite(tmp_path):
    def constant_pull(trainable, frozen, batch, key):
        loss = jnp.sum(trainable["matrix"] * 1e-3)
        return loss, {"loss": loss}

    options = replace(OPTIONS, learning_rate=3e38)
    with pytest.raises(LoadError, match="some parameters are not finite"):
        run_small(tmp_path, objective=constant_pull, options=options)
    latest = Snapshots(tmp_path / "states").latest
    assert latest is not None and 1 < latest < OPTIONS.steps


def test_a_run_by_the_clock_ends_with_finite_parameters_too():
    good = first_state({"matrix": jnp.ones(2)}, OPTIONS)
    NoSnapshots().save(good)
    with pytest.raises(LoadError, match="after step 0 some parameters are not finite"):
        NoSnapshots().save(replace(good, params={"matrix": jnp.array([1.0, jnp.nan])}))


def test_logits_that_are_not_finite_never_count_as_right():
    """Their argmax is token 0, for the target as for the drafter."""
    drafting = toy_objective(Recipe(anchors=4))
    params, frozen = toy_params(drafting)
    frozen["target"] = jax.tree.map(lambda x: x * jnp.nan, frozen["target"])
    batch = to_device(counting_sequences(count=2))
    _, metrics = jax.jit(drafting)(params, frozen, batch, jax.random.key(0))
    assert np.isnan(metrics["loss"])
    assert metrics["acceptance_length"] == 1 and metrics["first_draft"] == 0

    zeros = batch._replace(tokens=jnp.zeros_like(batch.tokens))
    predicting = TargetObjective(toy_target(), jnp.float32)
    _, metrics = jax.jit(predicting)(frozen["target"], {}, zeros, jax.random.key(0))
    assert np.isnan(metrics["loss"]) and metrics["accuracy"] == 0


def test_the_log_of_a_healthy_run_is_json(tmp_path):
    run_small(tmp_path)
    for line in (tmp_path / "log.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
