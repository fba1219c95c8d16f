"""The update of a step, against AdamW by hand in float64: clipping, and what is decayed."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import OPTIONS, sequences

from jaxspec.training.objective import to_device
from jaxspec.training.optimizer import learning_rate
from jaxspec.training.train_step import first_state, make_step

PULL = {"matrix": np.array([[3.0, -1.0], [2.0, 0.5]]), "scale": np.array([1.0, -2.0])}
START = {"matrix": np.array([[1.0, 2.0], [-3.0, 4.0]]), "scale": np.array([1.5, 0.5])}
SIZES = (1e4, 0.05)
"""Factors of the gradient in the first step, where it is clipped, and in the second."""
CHANGED = replace(OPTIONS, steps=2, warmup=0.0, clip=0.7, weight_decay=0.3, second_moment=0.9)


def pulled(trainable, frozen, batch, key):
    """Has the gradient `PULL`, times the factor of the step."""
    loss = frozen["step"]["size"] * sum(jnp.sum(trainable[name] * PULL[name]) for name in PULL)
    return loss, {"loss": loss}


def adamw(gradients, options):
    """The parameters after steps with these gradients; only the matrix is decayed."""
    values = dict(START)
    mean, square = ({name: 0.0 * x for name, x in START.items()} for _ in range(2))
    for step, gradient in enumerate(gradients):
        rate = float(learning_rate(options, jnp.float32(step / options.steps)))
        for name, x in gradient.items():
            mean[name] = 0.9 * mean[name] + 0.1 * x
            square[name] = options.second_moment * square[name]
            square[name] += (1 - options.second_moment) * x**2
            direction = mean[name] / (1 - 0.9 ** (step + 1))
            direction /= np.sqrt(square[name] / (1 - options.second_moment ** (step + 1))) + 1e-8
            decay = options.weight_decay * values[name] if name == "matrix" else 0.0
            values[name] = values[name] - rate * (direction + decay)
    return values


def learned(options, sizes=SIZES):
    step = make_step(pulled, options)
    state = first_state({name: jnp.asarray(x) for name, x in START.items()}, options)
    batch = to_device(sequences().take(np.arange(2)))
    norms = []
    for size in sizes:
        state, metrics = step(state, {"step": {"size": jnp.float32(size)}}, batch)
        norms.append(float(metrics["gradient_norm"]))
    return state.params, norms


def test_a_gradient_above_the_limit_is_scaled_down_to_it():
    """The moments of the first step reach into the second, where Adam's own scale does not hide
    what they were."""
    norm = np.sqrt(sum(np.sum(x**2) for x in PULL.values()))
    clipped = [min(size, CHANGED.clip / norm) for size in SIZES]
    assert clipped[0] < SIZES[0] and clipped[1] == SIZES[1]
    expected = adamw([{n: size * x for n, x in PULL.items()} for size in clipped], CHANGED)
    params, norms = learned(CHANGED)
    for name in expected:
        np.testing.assert_allclose(params[name], expected[name], rtol=1e-5)
    np.testing.assert_allclose(norms, np.multiply(SIZES, norm), rtol=1e-5)


@pytest.mark.parametrize("method", ["adamw", "muon"])
def test_without_a_gradient_matrices_decay_and_the_scales_of_norms_stay(method):
    """The learning rate is 0 in the first step, and half of the highest in the second."""
    params, _ = learned(replace(CHANGED, method=method), sizes=(0.0, 0.0))
    shrunk = 1 - CHANGED.learning_rate / 2 * CHANGED.weight_decay
    np.testing.assert_allclose(params["matrix"], shrunk * START["matrix"], rtol=1e-6)
    np.testing.assert_array_equal(params["scale"], START["scale"])
