"""Loaded parameters are the stored tensors: fused, transposed, cast, and nothing else."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_checkpoints import (
    BF16,
    KEPT,
    SPECULATORS,
    TARGET,
    ZLAB,
    speculators_tensors,
    target_tensors,
    write,
    zlab_tensors,
)

from jaxspec.checkpoint import stream
from jaxspec.checkpoint.load import open_drafter, open_target
from jaxspec.checkpoint.names import drafter_sources, target_sources
from jaxspec.errors import LoadError
from jaxspec.models.dflash import DFlash
from jaxspec.models.parameters import parameter_shapes
from jaxspec.models.qwen3 import Qwen3

DTYPES = (np.dtype(np.float32), BF16, np.dtype(np.float16))


def layer_from(tensors, layer):
    """The expected parameters of a layer, written out by hand."""
    stored = {
        name.removeprefix(f"{layer}."): tensor
        for name, tensor in tensors.items()
        if name.startswith(f"{layer}.")
    }
    qkv = [stored[f"self_attn.{name}_proj.weight"].T for name in "qkv"]
    gate_up = [stored[f"mlp.{name}_proj.weight"].T for name in ("gate", "up")]
    return {
        "attention/norm/scale": stored["input_layernorm.weight"],
        "attention/qkv/kernel": np.concatenate(qkv, axis=1),
        "attention/q_norm/scale": stored["self_attn.q_norm.weight"],
        "attention/k_norm/scale": stored["self_attn.k_norm.weight"],
        "attention/out/kernel": stored["self_attn.o_proj.weight"].T,
        "mlp/norm/scale": stored["post_attention_layernorm.weight"],
        "mlp/gate_up/kernel": np.concatenate(gate_up, axis=1),
        "mlp/down/kernel": stored["mlp.down_proj.weight"].T,
    }


def layers_from(tensors, count):
    return {
        f"layers_{i}/{path}": value
        for i in range(count)
        for path, value in layer_from(tensors, f"layers.{i}").items()
    }


def target_from(tensors):
    plain = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    expected = layers_from(plain, TARGET["num_hidden_layers"])
    expected["embedding/embedding"] = plain["embed_tokens.weight"]
    expected["norm/scale"] = plain["norm.weight"]
    if "lm_head.weight" in plain:
        expected["head/kernel"] = plain["lm_head.weight"].T
    return expected


def drafter_from(tensors):
    expected = layers_from(tensors, ZLAB["num_hidden_layers"])
    expected["feature_projection/kernel"] = tensors["fc.weight"].T
    expected["feature_norm/scale"] = tensors["hidden_norm.weight"]
    expected["norm/scale"] = tensors["norm.weight"]
    if "embed_tokens.weight" in tensors:
        expected["embedding/embedding"] = tensors["embed_tokens.weight"]
    if "lm_head.weight" in tensors:
        expected["head/kernel"] = tensors["lm_head.weight"].T
    if "d2t" in tensors:
        expected["target_ids"] = KEPT
    return expected


def assert_loaded(params, expected, dtype):
    found: dict[str, Any] = flatten_dict(params, sep="/")
    assert found.keys() == expected.keys()
    for path, array in found.items():
        wanted = jnp.int32 if path == "target_ids" else dtype
        assert array.dtype == wanted, path
        np.testing.assert_array_equal(array, expected[path].astype(wanted), err_msg=path)


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    stored=st.sampled_from(DTYPES),
    asked=st.sampled_from(DTYPES),
    shards=st.integers(1, 4),
    tied=st.booleans(),
    prefixed=st.booleans(),
    piece_bytes=st.integers(16, 2000),
    backend=st.sampled_from(["cpu", "gpu"]),
)
def test_target(
    tmp_path_factory, monkeypatch, stored, asked, shards, tied, prefixed, piece_bytes, backend
):
    monkeypatch.setattr(stream, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)  # a CPU assembles on the host
    config = TARGET | {"tie_word_embeddings": tied}
    tensors = target_tensors(config, stored)
    if not prefixed:
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    folder = write(tmp_path_factory.mktemp("target"), config, tensors, shards)
    params = open_target(folder).load(asked)
    assert_loaded(params, target_from(tensors), asked)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_zlab_drafter(tmp_path, prefix):
    tensors = zlab_tensors(dtype=BF16)
    folder = write(tmp_path, ZLAB, {prefix + name: tensor for name, tensor in tensors.items()})
    drafter = open_drafter(folder)
    assert not drafter.config.owns_embedding and not drafter.config.owns_head
    assert_loaded(drafter.load(BF16), drafter_from(tensors), BF16)


def test_speculators_drafter_with_a_reduced_vocabulary(tmp_path):
    tensors = speculators_tensors()
    drafter = open_drafter(write(tmp_path, SPECULATORS, tensors))
    assert drafter.config.owns_embedding and drafter.config.owns_head
    assert drafter.config.draft_vocab_size == len(KEPT)
    assert_loaded(drafter.load(jnp.float32), drafter_from(tensors), jnp.float32)


@pytest.mark.parametrize("left_out", [(), ("embed_tokens.weight",), ("lm_head.weight",)])
def test_speculators_drafter_with_the_whole_vocabulary(tmp_path, left_out):
    config = SPECULATORS | {"draft_vocab_size": 40}
    tensors = speculators_tensors(config)
    for name in left_out:
        del tensors[name]
    drafter = open_drafter(write(tmp_path, config, tensors))
    assert drafter.config.draft_vocab_size is None
    assert drafter.config.owns_embedding == ("embed_tokens.weight" in tensors)
    assert drafter.config.owns_head == ("lm_head.weight" in tensors)
    assert_loaded(drafter.load(jnp.float32), drafter_from(tensors), jnp.float32)


@pytest.mark.parametrize("tied", [True, False])
def test_the_table_makes_the_model_s_own_shapes(tied):
    target = open_target_config(tied)
    shapes = parameter_shapes(Qwen3(target))
    assert {p: s.shape for p, s in target_sources(target).items()} == shapes_of(shapes)


def test_the_table_makes_the_drafter_s_own_shapes(tmp_path):
    for name, config, tensors in (
        ("zlab", ZLAB, zlab_tensors()),
        ("speculators", SPECULATORS, speculators_tensors()),
    ):
        found = open_drafter(write(tmp_path / name, config, tensors)).config
        shapes = parameter_shapes(DFlash(found))
        assert {p: s.shape for p, s in drafter_sources(found).items()} == shapes_of(shapes)


def shapes_of(structs):
    return {path: struct.shape for path, struct in structs.items()}


def open_target_config(tied):
    from jaxspec.checkpoint.entries import Entries
    from jaxspec.checkpoint.target_config import target_config_of

    return target_config_of(Entries(TARGET | {"tie_word_embeddings": tied}, "config.json"))


def test_a_tied_target_may_still_carry_its_head(tmp_path):
    config = TARGET | {"tie_word_embeddings": True}
    params = open_target(write(tmp_path, config, target_tensors(TARGET))).load(jnp.float32)
    assert_loaded(params, target_from(target_tensors(config)), jnp.float32)


def test_rotary_tables_are_ignored(tmp_path):
    tensors = zlab_tensors()
    stray = {"layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float64)}
    params = open_drafter(write(tmp_path, ZLAB, tensors | stray)).load(jnp.float32)
    assert_loaded(params, drafter_from(tensors), jnp.float32)


def test_any_name_will_do_for_the_only_file(tmp_path):
    folder = write(tmp_path, ZLAB, zlab_tensors())
    (folder / "model.safetensors").rename(folder / "drafter.safetensors")
    params = open_drafter(folder).load(jnp.float32)
    assert_loaded(params, drafter_from(zlab_tensors()), jnp.float32)


def test_a_snapshot_of_the_hub_s_cache_links_to_its_blobs(tmp_path):
    written = write(tmp_path / "written", TARGET, target_tensors(), shards=2)
    blobs = tmp_path / "models--org--name" / "blobs"
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in written.iterdir():
        path.rename(blobs / f"blob-{path.name}")
        (snapshot / path.name).symlink_to(f"../../blobs/blob-{path.name}")
    params = open_target(snapshot).load(jnp.float32)
    assert_loaded(params, target_from(target_tensors()), jnp.float32)


@pytest.mark.parametrize(
    ("stored", "exact"),
    [
        ([BF16], jnp.bfloat16),
        ([np.float16], jnp.float16),
        ([np.float32, BF16], jnp.float32),
        ([np.float16, BF16], jnp.float32),
    ],
)
def test_exact_dtype(tmp_path, stored, exact):
    tensors = {
        name: tensor.astype(stored[i % len(stored)])
        for i, (name, tensor) in enumerate(target_tensors().items())
    }
    assert open_target(write(tmp_path, TARGET, tensors)).exact_dtype == exact


def test_the_block_size_may_be_chosen(tmp_path):
    drafter = open_drafter(write(tmp_path, ZLAB, zlab_tensors()), block_size=3)
    assert drafter.config.block_size == 3
    assert_loaded(drafter.load(BF16), drafter_from(zlab_tensors()), BF16)


def test_rounding_is_to_nearest_even(tmp_path):
    between = np.array([1 + 2**-8, 1 + 3 * 2**-8], np.float32)
    tensors = target_tensors()
    tensors["model.norm.weight"] = np.resize(between, 16)
    params = open_target(write(tmp_path, TARGET, tensors)).load(jnp.bfloat16)
    expected = np.resize(np.array([1.0, 1 + 2**-6], ml_dtypes.bfloat16), 16)
    np.testing.assert_array_equal(params["norm"]["scale"], expected)


@pytest.mark.parametrize(
    ("message", "kind", "named"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory", LoadError, "do not fit the device"),
        ("INTERNAL: other trouble", jax.errors.JaxRuntimeError, "other trouble"),
    ],
)
def test_a_device_without_room(tmp_path, monkeypatch, message, kind, named):
    def assemble(*_):
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(stream, "_assemble", assemble)
    with pytest.raises(kind, match=named):
        open_target(write(tmp_path, TARGET, target_tensors())).load(jnp.float32)


def test_progress_counts_every_byte_once(tmp_path):
    checkpoint, counted = open_target(write(tmp_path, TARGET, target_tensors())), []
    checkpoint.load(jnp.float32, counted.append)
    stored = sum(tensor.nbytes for tensor in target_tensors().values())
    assert sum(counted) == checkpoint.num_bytes == stored and len(counted) > 10


def test_nothing_is_read_of_the_weights_when_opening(tmp_path):
    """Only the header is in the file; the bytes of the tensors are a hole."""
    folder = write(tmp_path, TARGET, target_tensors())
    path = folder / "model.safetensors"
    size, length = path.stat().st_size, int.from_bytes(path.read_bytes()[:8], "little")
    header = path.read_bytes()[: 8 + length]
    with open(path, "wb") as file:
        file.write(header)
        file.truncate(size)
    assert json.loads(header[8:]) and open_target(folder).config.vocab_size == 40
