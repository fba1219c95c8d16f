"""Every kind of drafter learns, is exported, and drafts what it learned in the engine."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_toys import MASK_TOKEN, TWO_SLOTS, VOCAB, counting_sequences, decoder

from jaxspec.checkpoint.load import open_drafter
from jaxspec.checkpoint.pair import fitted
from jaxspec.engine.engine import Engine
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.engine.step.io import Models
from jaxspec.models.config import Qwen3Config
from jaxspec.models.dflash import DFlash
from jaxspec.models.eagle3 import Eagle3
from jaxspec.models.parameters import random_params
from jaxspec.models.qwen3 import Qwen3
from jaxspec.proposers.drafters import proposer_of
from jaxspec.training.export_drafter import export_drafter
from jaxspec.training.new_drafter import drafter_config, eagle3_config, first_drafter_params
from jaxspec.training.objective import (
    DrafterObjective,
    TargetObjective,
    split_frozen,
    to_device,
)
from jaxspec.training.recipe import DrafterShape, Optimization, Recipe
from jaxspec.training.train_step import first_state, make_step

OPTIONS = Optimization(steps=120, batch_size=8, learning_rate=1e-2, warmup=0.1, compute="float32")
RECIPE = Recipe(anchors=6, dspark_weights=(0.3, 0.9, 0.5), selector_weight=0.7)
WEIGHTS = {
    "dspark": {"cross_entropy": 0.3, "distance": 0.9, "confidence": 0.5},
    "dflash2": {"cross_entropy": 1.0, "selection": 0.7},
}
LAYOUTS = {"dspark": {"deepspec"}, "dflash2": {"zlab"}, "eagle3": {"deepspec"}}


def run(objective, params, frozen, steps):
    """The parameters after training, and the metrics of every step."""
    step, state, logged = make_step(objective, OPTIONS), first_state(params, OPTIONS), []
    for done in range(steps):
        batch = counting_sequences().batch_of_step(done, OPTIONS.batch_size, OPTIONS.seed)
        state, metrics = step(state, frozen, to_device(batch), done / steps)
        logged.append({name: float(value) for name, value in metrics.items()})
    return state.params, logged


@pytest.fixture(scope="module")
def target():
    """A target that counts on, and its parameters."""
    model = Qwen3(Qwen3Config(decoder(3), VOCAB, True), (0, 1))
    params, logged = run(
        TargetObjective(model, jnp.float32), random_params(model, jax.random.key(0)), {}, 200
    )
    assert logged[-1]["accuracy"] > 0.9
    return model, params


def new_drafter(target: Qwen3Config, kind: str):
    shape = DrafterShape(kind, block_size=4, layers=1, layer_ids=(0, 1), rank=8, markov="rnn")
    if kind == "eagle3":
        return Eagle3(eagle3_config(target, shape))
    return DFlash(drafter_config(target, shape, MASK_TOKEN))


@pytest.mark.parametrize("kind", ["dspark", "dflash2", "eagle3"])
def test_it_learns_is_read_back_and_drafts(target, tmp_path, kind):
    model, target_params = target
    drafter = new_drafter(model.config, kind)
    objective = DrafterObjective(model, drafter, RECIPE, jnp.float32)
    start = first_drafter_params(drafter, model.config, target_params, None, jax.random.key(1))
    trainable, stays = split_frozen(start)
    frozen = {"target": target_params, "drafter": stays}
    learned, logged = run(objective, trainable, frozen, OPTIONS.steps)
    first, last = logged[0], logged[-1]
    assert last["loss"] < first["loss"] / 2 and last["acceptance_length"] > 3.5
    for name, weights in WEIGHTS.items():
        if name == kind:
            total = sum(weight * last[term] for term, weight in weights.items())
            assert total == pytest.approx(last["loss"], rel=1e-5)
            assert all(last[term] < first[term] for term in weights)
    moved = jax.tree.map(lambda old, new: np.any(np.asarray(old) != new), trainable, learned)
    assert all(jax.tree.leaves(moved)), "every trained parameter gets a gradient"

    export_drafter(tmp_path, drafter.config, learned, model.config, target_params, "target")
    assert {folder.name for folder in tmp_path.iterdir()} == LAYOUTS[kind] | {"speculators"}
    for folder in tmp_path.iterdir():
        checkpoint = open_drafter(folder)
        config = fitted(model.config, checkpoint.config)
        assert (config.kind, config.num_drafts) == (kind, 3)
        params = {"target": target_params, "drafter": checkpoint.load(jnp.float32)}
        for name in ("embedding", "head"):
            params["drafter"].pop(name, None)
        rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), learned)
        jax.tree.map(np.testing.assert_array_equal, params["drafter"], rounded)

    config = replace(config, owns_embedding=False, owns_head=False)
    models = Models(model, (proposer_of(config, jnp.float32),))
    engine = Engine.from_models(models, params, **TWO_SLOTS)
    prompts = counting_sequences().tokens[:2, :6].tolist()
    outputs = engine.generate(prompts, SamplingParams(max_tokens=13))
    lengths = [length for output in outputs for length in output.stats.acceptance_lengths]
    assert np.mean(lengths) > 3
