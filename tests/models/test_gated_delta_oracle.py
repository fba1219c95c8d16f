"""The float64 recurrence agrees with transformers' Qwen3.5, layer by layer."""

import numpy as np
import pytest

from oracles import gated_delta_numpy as delta
from oracles import records
from oracles.hybrid_layers import (
    layer_in_float64,
    layer_weights,
    linear_layers,
    of_mixer,
    residual_before,
)

NAMES = records.names("qwen35")
STATEFUL = [name for name in NAMES if "states" in records.read("qwen35", name).outputs]


@pytest.mark.parametrize("name", NAMES)
def test_every_linear_layer_equals_transformers(name):
    record = records.read("qwen35", name)
    for layer in linear_layers(record.config):
        after, _ = layer_in_float64(record, layer)
        assert records.relative_error(after, record.outputs["after_layers"][layer]) < 1e-5


@pytest.mark.parametrize("name", STATEFUL)
def test_states_equal_transformers(name):
    record = records.read("qwen35", name)
    for row, layer in enumerate(linear_layers(record.config)):
        _, states = layer_in_float64(record, layer)
        for kept, prefix in (states[record.case["prefix"] - 1], "prefix_"), (states[-1], ""):
            heads = record.outputs[f"{prefix}states"][row]
            inputs = record.outputs[f"{prefix}convolutions"][row].T
            assert records.relative_error(kept.heads, heads) < 2e-5
            assert records.relative_error(kept.inputs, inputs) < 2e-5


def test_states_are_recorded_for_most_cases():
    assert len(STATEFUL) == len(NAMES) - 1


@pytest.mark.parametrize("name", NAMES)
def test_the_draws_keep_decays_in_a_range_that_matters(name):
    """Else a wrong decay would hide behind states that are forgotten or kept at once."""
    record = records.read("qwen35", name)
    config, decays = record.config, []
    for layer in linear_layers(config):
        weights = layer_weights(config, layer)
        x, eps = residual_before(record, layer), config["rms_norm_eps"]
        normed = delta.centred_norm(x, weights["input_layernorm.weight"], eps)
        mixer = of_mixer(weights)
        steps = delta.softplus(normed @ mixer["in_proj_a.weight"].T + mixer["dt_bias"])
        decays.append(np.exp(-np.exp(mixer["A_log"]) * steps))
    decays = np.concatenate(decays)
    assert 0.3 < decays.min() < 0.6 and 0.95 < decays.max() < 0.99
