"""Training works, and changes only the parameters that it should."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_toys import (
    TWO_SLOTS,
    VOCAB,
    counting_sequences,
    toy_drafter,
    toy_objective,
    toy_params,
    toy_target,
)

from jaxspec.engine.engine import Engine
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.engine.step.io import Models
from jaxspec.errors import UsageError
from jaxspec.models.dflash import DFlash
from jaxspec.proposers.dflash import DFlashProposer
from jaxspec.training.kept_features import with_kept_features
from jaxspec.training.new_drafter import first_drafter_params
from jaxspec.training.objective import Batch, Metrics, TargetObjective, to_device
from jaxspec.training.recipe import Optimization, Recipe
from jaxspec.training.train_step import first_state, make_step

OPTIONS = Optimization(steps=250, batch_size=8, learning_rate=1e-2, warmup=0.1, compute="float32")


def run(objective, params, frozen, options, sequences):
    step, state = make_step(objective, options), first_state(params, options)
    metrics: Metrics = {}
    for done in range(options.steps):
        batch = sequences.batch_of_step(done, options.batch_size, options.seed)
        state, metrics = step(state, frozen, to_device(batch))
    return state.params, metrics


def first_batch() -> Batch:
    return to_device(counting_sequences().batch_of_step(0, 4, 0))


def test_toy_overfits_to_full_acceptance():
    sequences = counting_sequences()
    target = TargetObjective(toy_target(), jnp.float32)
    _, random = toy_params(toy_objective(Recipe()))
    taught, metrics = run(target, random["target"], {}, OPTIONS, sequences)
    assert metrics["accuracy"] > 0.9

    objective = toy_objective(Recipe(anchors=6, labels="argmax"))
    params, frozen = toy_params(objective)
    frozen = {**frozen, "target": taught}
    learned, metrics = run(objective, params, frozen, OPTIONS, sequences)
    assert metrics["acceptance_length"] == objective.drafter.config.block_size

    params = {"target": taught, "drafter": {**frozen["drafter"], **learned}}
    models = Models(objective.target, (DFlashProposer(objective.drafter),))
    engine = Engine.from_models(models, params, **TWO_SLOTS)
    prompts = sequences.tokens[:2, :6].tolist()
    for output in engine.generate(prompts, SamplingParams(max_tokens=13)):
        assert set(output.stats.acceptance_lengths) == {objective.drafter.config.block_size}


def test_muon_learns_too():
    objective = toy_objective(Recipe(anchors=6, labels="data", weighting="decay"))
    options = replace(OPTIONS, steps=120, method="muon")
    _, metrics = run(objective, *toy_params(objective), options, counting_sequences())
    assert metrics["acceptance_length"] > 2.0


@pytest.mark.parametrize("labels", ["argmax", "data", "distill"])
def test_gradients_reach_only_the_drafter(labels):
    """The loss depends on the others too."""
    objective = toy_objective(Recipe(anchors=3, labels=labels), toy_drafter(draft_vocab=9))
    params, frozen = toy_params(objective)
    frozen["drafter"]["target_ids"] = jnp.arange(9) * 2
    moved, _ = jax.jit(jax.grad(objective, has_aux=True))(
        params, frozen, first_batch(), jax.random.key(0)
    )
    assert set(params) | {"head", "target_ids"} == set(
        objective.drafter.bind({"params": {**params, **frozen["drafter"]}}).variables["params"]
    )
    for path, gradient in jax.tree.leaves_with_path(moved):
        assert jnp.any(gradient != 0), path


def test_a_step_leaves_frozen_parameters_as_they_are():
    objective = toy_objective(Recipe(anchors=3, labels="argmax"), toy_drafter(draft_vocab=9))
    params, frozen = toy_params(objective)
    frozen["drafter"]["target_ids"] = jnp.arange(9) * 2
    step, state = make_step(objective, OPTIONS), first_state(params, OPTIONS)
    before = jax.tree.map(np.array, frozen)
    state, _ = step(state, frozen, first_batch())
    jax.tree.map(np.testing.assert_array_equal, before, frozen)


def test_accumulated_parts_are_the_mean_of_the_whole():
    """Every label is known and every anchor taken, so parts and whole see the same blocks."""
    recipe = Recipe(anchors=20, labels="data", weighting="decay")
    objective = toy_objective(recipe)
    params, frozen = toy_params(objective)
    losses = []
    for parts in 1, 2:
        options = Optimization(steps=3, batch_size=4, accumulation=parts, compute="float32")
        step = make_step(objective, options)
        _, metrics = step(first_state(params, options), frozen, first_batch())
        losses.append([float(metrics["loss"]), float(metrics["gradient_norm"])])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def test_chunks_of_the_head_change_nothing():
    values = []
    for chunk in 2, 6:
        objective = toy_objective(Recipe(anchors=6, head_chunk=chunk))
        params, frozen = toy_params(objective)
        gradient, metrics = jax.jit(jax.grad(objective, has_aux=True))(
            params, frozen, first_batch(), jax.random.key(0)
        )
        values.append((gradient, metrics["loss"]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), *values)


def test_a_token_outside_the_reduced_vocabulary_is_never_right():
    objective = toy_objective(Recipe(anchors=6, labels="data"), toy_drafter(draft_vocab=1))
    params, frozen = toy_params(objective)
    frozen["drafter"]["target_ids"] = jnp.array([VOCAB - 1])
    _, metrics = jax.jit(objective)(params, frozen, first_batch(), jax.random.key(0))
    assert metrics["acceptance_length"] == 1 and metrics["loss"] == 0


def test_kept_features_change_nothing(tmp_path):
    objective = toy_objective(Recipe(anchors=6))
    params, frozen = toy_params(objective)
    sequences = counting_sequences(count=5)
    losses = []
    for some in sequences, with_kept_features(objective, frozen["target"], sequences, 2, tmp_path):
        batch = to_device(some.take(np.arange(5)))
        losses.append(float(jax.jit(objective)(params, frozen, batch, jax.random.key(0))[0]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    again = with_kept_features(objective, {}, sequences, 2, tmp_path)
    assert isinstance(again.features, np.memmap)


def test_layers_can_start_as_the_targets_last():
    objective = toy_objective(Recipe())
    target, drafter = objective.target.config, objective.drafter
    one_layer = replace(drafter.config.decoder, num_layers=1)
    masks = drafter.config.block_masks[:1]
    drafter = DFlash(replace(drafter.config, decoder=one_layer, block_masks=masks))
    _, frozen = toy_params(objective)
    params = first_drafter_params(drafter, target, frozen["target"], None, jax.random.key(3), True)
    jax.tree.map(np.testing.assert_array_equal, params["layers_0"], frozen["target"]["layers_1"])
    with pytest.raises(UsageError, match="the drafter has 2 .* fewer than the target's 2"):
        first_drafter_params(
            objective.drafter, target, frozen["target"], None, jax.random.key(3), True
        )
