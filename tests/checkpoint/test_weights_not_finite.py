"""Weights that are NaN or infinite are named when they are loaded, by both readers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_checkpoints import (
    BF16,
    SPECULATORS,
    TARGET,
    ZLAB,
    speculators_tensors,
    target_tensors,
    write,
    zlab_tensors,
)

from jaxspec.checkpoint import finite, stream
from jaxspec.checkpoint.conversion import convert
from jaxspec.checkpoint.finite import count_not_finite, is_finite
from jaxspec.checkpoint.load import open_drafter, open_target
from jaxspec.checkpoint.orbax_folder import save
from jaxspec.errors import LoadError

NAME = "layers.1.self_attn.k_proj.weight"
KINDS = [np.dtype(np.float32), BF16, np.dtype(np.float16)]


def damaged(dtype, *values):
    """A target's tensors, one of which begins with these values."""
    tensors = target_tensors(dtype=dtype)
    tensors[f"model.{NAME}"].flat[: len(values)] = values
    return tensors


def refused(load, *named):
    with pytest.raises(LoadError) as caught:
        load()
    message = str(caught.value)
    assert "\n" not in message and all(words in message for words in named), message


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -np.nan])
def test_the_tensor_is_named_and_its_numbers_are_counted(tmp_path, dtype, value):
    folder = write(tmp_path, TARGET, damaged(dtype, value, 1.0, value))
    load = lambda: open_target(folder).load(dtype)
    refused(load, f"model.safetensors: tensor {NAME} has 2 of 256 numbers", "not finite")


def test_only_the_largest_of_many_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "PIECE_BYTES", 64)
    monkeypatch.setattr(finite, "PIECE", 7)
    tensors = target_tensors(dtype=BF16)
    tensors["model.norm.weight"][-1] = np.nan
    load = lambda: open_target(write(tmp_path, TARGET, tensors)).load(BF16)
    refused(load, "tensor norm.weight has 1 of 16 numbers")


def test_a_number_that_becomes_infinite(tmp_path):
    """65504 is the largest number of float16."""
    folder = write(tmp_path, TARGET, damaged(np.float32, 1e5, -1e5, 6e4))
    refused(lambda: open_target(folder).load(jnp.float16), NAME, "2 of 256", "in float16")
    assert open_target(folder).load(jnp.float32) and open_target(folder).load(jnp.bfloat16)


@pytest.mark.parametrize(
    ("config", "tensors", "name"),
    [
        (ZLAB, zlab_tensors, "fc.weight"),
        (SPECULATORS, speculators_tensors, "embed_tokens.weight"),
    ],
)
def test_weights_of_a_drafter(tmp_path, config, tensors, name):
    drafter = tensors()
    drafter[name].flat[5] = np.nan
    folder = write(tmp_path, config, drafter)
    refused(lambda: open_drafter(folder).load(jnp.float32), f"tensor {name} has 1 of")


def orbax(tmp_path, change, config=TARGET, tensors=target_tensors):
    """A converted folder whose parameters were changed before they were written again."""
    convert(write(tmp_path / "source", config, tensors()), tmp_path / "orbax")
    opened = open_target if config is TARGET else open_drafter
    params = opened(tmp_path / "orbax").load(jnp.float32)
    import shutil

    shutil.rmtree(tmp_path / "orbax" / "params")
    save(tmp_path / "orbax", change(params))
    return tmp_path / "orbax"


def test_weights_in_orbax(tmp_path):
    def poisoned(params):
        params["norm"]["scale"] = params["norm"]["scale"].at[3].set(jnp.nan)
        return params

    folder = orbax(tmp_path, poisoned)
    refused(lambda: open_target(folder).load(jnp.bfloat16), "parameter norm/scale has 1 of 16")


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64, jnp.bool_, jnp.uint8])
@pytest.mark.parametrize("which", ["one", "all"])
def test_dtypes_in_orbax(tmp_path, dtype, which):
    def recast(params):
        if which == "all":
            return jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        return params | {"norm": {"scale": params["norm"]["scale"].astype(dtype)}}

    folder = orbax(tmp_path, recast)
    refused(lambda: open_target(folder), f"is {jnp.dtype(dtype)}, expected bfloat16 or float16 or")


@pytest.mark.parametrize(
    "ids", [[0, 1, 2, 3, 4, 5, 40], [0, 0, 1, 2, 3, 4, 5], [-1, 1, 2, 3, 4, 5, 6]]
)
def test_draft_ids_in_orbax(tmp_path, ids):
    change = lambda params: params | {"target_ids": jnp.asarray(ids, jnp.int32)}
    folder = orbax(tmp_path, change, SPECULATORS, speculators_tensors)
    refused(lambda: open_drafter(folder).load(jnp.float32), "d2t leads to ids")


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_every_place_is_looked_at(dtype, backend, monkeypatch):
    """On a CPU by integers, on an accelerator by `isfinite`; both run here."""
    monkeypatch.setattr(finite, "PIECE", 16)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    limits = jnp.finfo(dtype)
    good = np.array([0.0, -0.0, limits.max, limits.min, limits.tiny, 1.0], dtype)
    values = np.resize(good, (5, 13))
    assert is_finite(jnp.asarray(values)) and count_not_finite(values) == 0
    for place in range(values.size):
        for wrong in np.nan, -np.nan, np.inf, -np.inf:
            bad = values.copy()
            bad.flat[place] = wrong
            assert not is_finite(jnp.asarray(bad)) and count_not_finite(bad) == 1


def test_what_does_not_fit_is_one_line(tmp_path, monkeypatch):
    folder = write(tmp_path, TARGET, target_tensors())

    def exhausted(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nallocating")

    def no_memory(*_):
        raise MemoryError

    for error in exhausted, no_memory:
        monkeypatch.setattr(stream, "_assemble", error)
        refused(lambda: open_target(folder).load(jnp.float32), "do not fit", "smaller model")
