"""Exported models are read back by the readers of published checkpoints."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_toys import VOCAB, toy_drafter, toy_target

from jaxspec.checkpoint.load import open_drafter, open_target
from jaxspec.checkpoint.pair import check_pair
from jaxspec.layers.decoder import BlockMask
from jaxspec.layers.rope import Rope, Yarn
from jaxspec.models.dflash import DFlash
from jaxspec.models.parameters import random_params
from jaxspec.models.qwen3 import Qwen3
from jaxspec.training.export import export_target
from jaxspec.training.export_drafter import export_speculators, export_zlab
from jaxspec.training.new_drafter import first_drafter_params, frequent_tokens, target_head

KEPT = np.array([0, 3, 4, 11])


def target_model(tied: bool) -> Qwen3:
    config = dataclasses.replace(
        toy_target().config, tie_word_embeddings=tied, eos_token_ids=(0, 5)
    )
    config = dataclasses.replace(config, decoder=dataclasses.replace(config.decoder, num_layers=4))
    return Qwen3(config)


def drafter_model(draft_vocab: int | None = None) -> DFlash:
    """A drafter with a full and a sliding layer, and YaRN."""
    config = toy_drafter(draft_vocab).config
    decoder = dataclasses.replace(config.decoder, rope=Rope(1e4, Yarn(4.0, 128, 16.0, 2.0)))
    masks = (BlockMask(False), BlockMask(True, 7))
    return DFlash(
        dataclasses.replace(config, decoder=decoder, block_masks=masks, num_target_layers=4)
    )


def same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def read_drafter(tmp_path):
    """Config and parameters of a drafter that fits its target."""
    target, drafter = open_target(tmp_path / "target"), open_drafter(tmp_path / "draft")
    check_pair(target.config, drafter.config)
    return drafter.config, drafter.load(jnp.float32)


@pytest.fixture(params=[True, False], ids=["tied", "own head"])
def target(request, tmp_path):
    model = target_model(request.param)
    params = random_params(model, jax.random.key(0))
    export_target(tmp_path / "target", model.config, params, jnp.float32)
    return model, params


def test_target(target, tmp_path):
    model, params = target
    read = open_target(tmp_path / "target")
    assert read.config == model.config
    same(params, read.load(jnp.float32))


def test_zlab(target, tmp_path):
    drafter = drafter_model()
    params = random_params(drafter, jax.random.key(1))
    export_zlab(tmp_path / "draft", drafter.config, params, jnp.float32)
    config, read = read_drafter(tmp_path)
    assert config == drafter.config
    same(params, read)


@pytest.mark.parametrize("draft_vocab", [None, len(KEPT)])
def test_speculators(target, tmp_path, draft_vocab):
    model, target_params = target
    drafter = drafter_model(draft_vocab)
    kept = None if draft_vocab is None else KEPT
    params = first_drafter_params(drafter, model.config, target_params, kept, jax.random.key(1))
    export_speculators(
        tmp_path / "draft",
        drafter.config,
        params,
        model.config,
        target_params,
        "../target",
        jnp.float32,
    )
    config, read = read_drafter(tmp_path)
    assert config.target_path == str(tmp_path / "target")
    assert config.owns_embedding and config.owns_head
    same(read.pop("embedding"), target_params["embedding"])
    head = target_head(model.config, target_params)
    np.testing.assert_array_equal(
        read.pop("head")["kernel"], head if kept is None else head[:, kept]
    )
    params.pop("head", None)
    same(params, read)


def test_a_reduced_vocabulary_in_zlab_layout_drafts_all_tokens(target, tmp_path):
    model, target_params = target
    drafter = drafter_model(len(KEPT))
    params = first_drafter_params(drafter, model.config, target_params, KEPT, jax.random.key(1))
    export_zlab(tmp_path / "draft", drafter.config, params, jnp.float32)
    config, read = read_drafter(tmp_path)
    assert config.draft_vocab_size is None and not config.owns_head
    same(read, {name: part for name, part in params.items() if name not in ("head", "target_ids")})


def test_frequent_tokens():
    tokens = np.array([[3, 3, 3, 4, 4, 11, 7]])
    np.testing.assert_array_equal(frequent_tokens(tokens, VOCAB, 3, (0,)), [0, 3, 4])
