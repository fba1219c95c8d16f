"""The golden pairs, read from disk as anybody would."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file

from jaxspec.checkpoint.load import load_drafter, load_target
from jaxspec.models.dflash import DFlash
from jaxspec.models.parameters import parameter_shapes
from jaxspec.models.qwen3 import Qwen3

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"
TARGET = GOLDENS / "a" / "target"


def loaded(kind: str, dtype=jnp.float32):
    if kind == "target":
        config, params = load_target(TARGET, dtype)
        return Qwen3(config, dtype=dtype), params
    target, _ = load_target(TARGET, dtype)
    config, params = load_drafter(GOLDENS / kind / "draft", target, dtype)
    return DFlash(config, dtype=dtype), params


@pytest.mark.parametrize("kind", ["target", "a", "as"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_parameters_are_the_model_s(kind, dtype):
    model, params = loaded(kind, dtype)
    found = {
        path: jax.ShapeDtypeStruct(array.shape, array.dtype)
        for path, array in flatten_dict(params, sep="/").items()
    }
    assert found == parameter_shapes(model)


def test_reduced_vocabulary_is_in_ids_of_the_target():
    model, params = loaded("as")
    stored = load_file(GOLDENS / "as" / "draft" / "model.safetensors")
    kept = np.flatnonzero(stored["t2d"])
    assert model.config.draft_vocab_size == len(kept) == 384
    np.testing.assert_array_equal(params["target_ids"], kept)


def test_configs():
    target, _ = load_target(TARGET, jnp.float32)
    zlab, _ = load_drafter(GOLDENS / "a" / "draft", target, jnp.float32)
    speculators, _ = load_drafter(GOLDENS / "as" / "draft", target, jnp.float32)
    assert target.eos_token_ids == (0,) and target.tie_word_embeddings
    assert zlab.target_layer_ids == speculators.target_layer_ids == (0, 2)
    assert zlab.block_size == speculators.block_size == 8
    assert zlab.mask_token_id == speculators.mask_token_id == 3
    assert not zlab.owns_embedding and not zlab.owns_head
    assert speculators.owns_embedding and speculators.owns_head
    assert speculators.target_path == str(GOLDENS / "as" / "target")
