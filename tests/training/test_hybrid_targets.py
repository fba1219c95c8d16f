"""Training a drafter for a Qwen3.5 target: its layers are those of Qwen3, whatever the target's."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from jaxspec.checkpoint.load import open_drafter, open_target
from jaxspec.checkpoint.pair import check_pair
from jaxspec.errors import UsageError
from jaxspec.layers.gated_delta import FLOAT32, DeltaSizes
from jaxspec.layers.rope import Rope
from jaxspec.models.config import Qwen35Config
from jaxspec.models.dflash import DFlash
from jaxspec.models.parameters import random_params
from jaxspec.models.targets import target_of
from jaxspec.training.data import Sequences
from jaxspec.training.export import export_target
from jaxspec.training.export_drafter import export_zlab
from jaxspec.training.loop import train
from jaxspec.training.new_drafter import drafter_config, first_drafter_params
from jaxspec.training.objective import (
    DrafterObjective,
    TargetObjective,
    in_dtype,
    split_frozen,
    to_device,
)
from jaxspec.training.pretraining.pretrain import TargetShape, target_config
from jaxspec.training.recipe import Cadence, DrafterShape, Optimization, Recipe
from jaxspec.training.rollout import continue_sequences

SHAPE = TargetShape(
    vocab_size=23,
    hidden_size=32,
    intermediate_size=48,
    layers=3,
    heads=2,
    kv_heads=1,
    head_dim=16,
    delta=DeltaSizes(1, 2, 8, 8, taps=4),
    attention_interval=2,
)
TARGET = target_config(SHAPE, end_token=0)
DRAFTER = DrafterShape(block_size=4, layers=1, layer_ids=(0, 1))
OPTIONS = Optimization(steps=60, batch_size=8, learning_rate=1e-2, compute="float32")


def counting(count: int = 16, length: int = 24) -> Sequences:
    """Sequences that count up by one or by two, around the vocabulary."""
    starts, strides = np.arange(count)[:, None], 1 + np.arange(count)[:, None] % 2
    tokens = (starts + strides * np.arange(length)) % (SHAPE.vocab_size - 1)
    return Sequences(tokens.astype(np.int32), np.zeros(count, np.int32))


def loss(objective, params, frozen) -> dict[str, float]:
    _, metrics = jax.jit(objective)(params, frozen, to_device(counting()), jax.random.key(0))
    return {name: float(value) for name, value in metrics.items()}


@pytest.mark.slow
def test_a_target_and_its_drafter_learn_to_count(tmp_path):
    """From random weights to drafts that are right, through every part of training."""
    objective = TargetObjective(target_of(TARGET), jnp.float32)
    params = random_params(objective.target, jax.random.key(0))
    params = train(objective, params, {}, counting(), OPTIONS, Cadence(), tmp_path / "target")
    assert loss(objective, params, {})["accuracy"] > 0.85

    text = continue_sequences(objective.target, params, counting(), 4, 8, 16, seed=0)
    right = (text.tokens == counting().tokens)[:, :12]
    assert right.mean() > 0.8

    config = drafter_config(TARGET, DRAFTER, mask_token_id=22)
    drafter = DFlash(config)
    start = first_drafter_params(drafter, TARGET, params, None, jax.random.key(1))
    trainable, stays = split_frozen(start)
    frozen = {"target": params, "drafter": stays}
    target = target_of(TARGET, config.target_layer_ids)
    of_drafter = DrafterObjective(target, drafter, Recipe(anchors=8), jnp.float32)
    before = loss(of_drafter, trainable, frozen)
    learned = train(of_drafter, trainable, frozen, text, OPTIONS, Cadence(), tmp_path / "drafter")
    after = loss(of_drafter, learned, frozen)
    assert before["acceptance_length"] < 1.4 < 2.2 < after["acceptance_length"]


def test_the_drafter_is_written_and_read_as_what_was_trained(tmp_path):
    params = random_params(target_of(TARGET), jax.random.key(0))
    export_target(tmp_path / "target", TARGET, params, jnp.float32)
    target = open_target(tmp_path / "target")
    assert target.config == TARGET and isinstance(target.config, Qwen35Config)

    config = drafter_config(TARGET, DRAFTER, mask_token_id=22)
    assert config.decoder.rope == Rope(SHAPE.rope_theta) and not config.decoder.wide_norms
    drafter_params = random_params(DFlash(config), jax.random.key(1))
    export_zlab(tmp_path / "draft", config, drafter_params, jnp.float32)
    drafter = open_drafter(tmp_path / "draft")
    check_pair(target.config, drafter.config)
    assert drafter.config == config
    read = drafter.load(jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, read, drafter_params)


def test_layers_cannot_be_copied_from_recurrent_ones():
    config = drafter_config(TARGET, dataclasses.replace(DRAFTER, from_target=True), 22)
    params = random_params(target_of(TARGET), jax.random.key(0))
    with pytest.raises(UsageError, match="layers of the target cannot be copied: it is a Qwen3.5"):
        first_drafter_params(DFlash(config), TARGET, params, None, jax.random.key(1), True)


def test_rates_and_biases_of_decays_stay_wide_in_a_narrow_computation():
    params = random_params(target_of(TARGET), jax.random.key(0))
    narrow = flatten_dict(in_dtype(params, jnp.bfloat16), sep="/")
    wide = {path for path, leaf in narrow.items() if leaf.dtype == jnp.float32}
    assert wide == {f"layers_{i}/delta/{name}" for i in (0, 2) for name in FLOAT32}
