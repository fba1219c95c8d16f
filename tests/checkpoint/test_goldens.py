"""The golden pairs, read from disk through the library's own door."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file

from jaxspec.checkpoint.load import open_drafter, open_target
from jaxspec.checkpoint.pair import check_pair
from jaxspec.models.dflash import DFlash
from jaxspec.models.parameters import parameter_shapes
from jaxspec.models.qwen3 import Qwen3

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"
TARGET = GOLDENS / "a" / "target"


def opened(kind: str, dtype=jnp.float32):
    """The model and its parameters."""
    if kind == "target":
        target = open_target(TARGET)
        return Qwen3(target.config, dtype=dtype), target.load(dtype)
    drafter = open_drafter(GOLDENS / kind / "draft")
    return DFlash(drafter.config, dtype=dtype), drafter.load(dtype)


@pytest.mark.parametrize("kind", ["target", "a", "as"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_parameters_are_the_model_s(kind, dtype):
    model, params = opened(kind, dtype)
    arrays: dict[str, Any] = flatten_dict(params, sep="/")
    shapes = {
        path: jax.ShapeDtypeStruct(array.shape, array.dtype) for path, array in arrays.items()
    }
    assert shapes == parameter_shapes(model)


def test_reduced_vocabulary_is_in_ids_of_the_target():
    drafter = open_drafter(GOLDENS / "as" / "draft")
    stored = load_file(GOLDENS / "as" / "draft" / "model.safetensors")
    kept = np.flatnonzero(stored["t2d"])
    assert drafter.config.draft_vocab_size == len(kept) == 384
    np.testing.assert_array_equal(drafter.load(jnp.float32)["target_ids"], kept)


def test_configs():
    target = open_target(TARGET).config
    zlab = open_drafter(GOLDENS / "a" / "draft").config
    speculators = open_drafter(GOLDENS / "as" / "draft").config
    check_pair(target, zlab)
    check_pair(target, speculators)
    assert target.eos_token_ids == (0,) and target.tie_word_embeddings
    assert zlab.target_layer_ids == speculators.target_layer_ids == (0, 2)
    assert zlab.block_size == speculators.block_size == 8
    assert zlab.mask_token_id == speculators.mask_token_id == 3
    assert not zlab.owns_embedding and not zlab.owns_head
    assert speculators.owns_embedding and speculators.owns_head
    assert speculators.target_path == str(GOLDENS / "as" / "target")
