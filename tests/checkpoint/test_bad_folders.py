"""Folders that are damaged, incomplete or of other models: found before any weight is read."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_checkpoints import (
    SPECULATORS,
    TARGET,
    ZLAB,
    speculators_tensors,
    target_tensors,
    write,
    write_index,
    zlab_tensors,
)

from jaxspec.checkpoint import stream
from jaxspec.checkpoint.load import open_drafter, open_target
from jaxspec.checkpoint.pair import check_pair
from jaxspec.checkpoint.safetensors_folder import stored_tensors
from jaxspec.errors import LoadError

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(autouse=True)
def no_weight_is_read(monkeypatch):
    def read(*_):
        raise AssertionError("weights were read")

    monkeypatch.setattr(stream, "stream_parameters", read)
    monkeypatch.setattr("jaxspec.checkpoint.load.stream_parameters", read)


def refused(folder, *named, load=open_target):
    with pytest.raises(LoadError) as caught:
        load(folder)
    message = str(caught.value)
    assert "\n" not in message
    for name in named:
        assert name in message, message


def test_no_weights(tmp_path):
    folder = write(tmp_path, TARGET, target_tensors())
    (folder / "model.safetensors").unlink()
    refused(folder, "no weights", "model.safetensors")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_pickles_are_not_opened(tmp_path, name):
    folder = write(tmp_path, TARGET, target_tensors())
    (folder / "model.safetensors").rename(folder / name)
    refused(folder, name, "never opened")


def test_a_mask_embedding_of_its_own(tmp_path):
    folder = write(tmp_path, ZLAB, zlab_tensors())
    (folder / "mask_embedding.pt").write_bytes(b"\x80")
    refused(folder, "mask_embedding.pt", load=open_drafter)


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1])
def test_truncated(tmp_path, keep):
    path = write(tmp_path, TARGET, target_tensors()) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(tmp_path, "model.safetensors is not a whole safetensors file")


def test_longer_than_its_header_says(tmp_path):
    path = write(tmp_path, TARGET, target_tensors()) / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"more")
    refused(tmp_path, "model.safetensors is not a whole safetensors file")


@settings(deadline=None)
@given(place=st.integers(0, 600), byte=st.integers(0, 255))
def test_a_damaged_header_is_noticed_or_harmless(tmp_path_factory, place, byte):
    folder = write(tmp_path_factory.mktemp("damaged"), ZLAB, zlab_tensors())
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[place] = byte
    (folder / "model.safetensors").write_bytes(content)
    try:
        open_drafter(folder)
    except LoadError as error:
        assert "\n" not in str(error)


def test_missing_tensor(tmp_path):
    tensors = target_tensors()
    del tensors[Q_PROJ]
    refused(write(tmp_path, TARGET, tensors), "no tensor layers.1.self_attn.q_proj.weight")


def test_missing_head(tmp_path):
    tied = target_tensors(TARGET | {"tie_word_embeddings": True})
    refused(write(tmp_path, TARGET, tied), "no tensor lm_head.weight", "[40, 16]")


@pytest.mark.parametrize("name", ["model.layers.3.mlp.up_proj.weight", "model.visual.weight"])
def test_extra_tensor(tmp_path, name):
    tensors = target_tensors() | {name: np.zeros((2, 2), np.float32)}
    refused(write(tmp_path, TARGET, tensors), "unknown tensor", name.removeprefix("model."))


def test_extra_bias(tmp_path):
    tensors = target_tensors()
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(32, np.float32)
    refused(write(tmp_path, TARGET, tensors), "layers.0.self_attn.q_proj.bias")


@pytest.mark.parametrize("shape", [(16, 32), (32,), (32, 16, 1)])
def test_misshapen_tensor(tmp_path, shape):
    tensors = target_tensors() | {Q_PROJ: np.zeros(shape, np.float32)}
    refused(
        write(tmp_path, TARGET, tensors),
        "layers.1.self_attn.q_proj.weight",
        f"[{', '.join(map(str, shape))}]",
        "expected [32, 16]",
    )


@pytest.mark.parametrize("dtype", [np.float64, np.int8, np.int32])
def test_dtype_of_no_weight(tmp_path, dtype):
    tensors = target_tensors()
    tensors[Q_PROJ] = tensors[Q_PROJ].astype(dtype)
    refused(write(tmp_path, TARGET, tensors), "layers.1.self_attn.q_proj.weight", "BF16")


def test_the_same_tensor_twice(tmp_path):
    tensors = zlab_tensors()
    twice = tensors | {"model.norm.weight": tensors["norm.weight"]}
    refused(write(tmp_path, ZLAB, twice), "both norm.weight and model.norm", load=open_drafter)


def sharded(folder, **files):
    """A folder in two shards, whose index is changed to name these files for these tensors."""
    write(folder, TARGET, target_tensors(), shards=2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    write_index(folder, index | files)
    return folder


def test_index_names_a_missing_file(tmp_path):
    folder = sharded(tmp_path)
    (folder / "model-00002-of-00002.safetensors").unlink()
    refused(folder, "model-00002-of-00002.safetensors", "which is missing")


@pytest.mark.parametrize("name", ["../secret.safetensors", "/secret.safetensors", "a/../../b"])
def test_index_leads_out_of_the_folder(tmp_path, name):
    refused(sharded(tmp_path, **{Q_PROJ: name}), name, "outside the folder")


def test_a_link_leads_out_of_the_folder(tmp_path):
    folder = sharded(tmp_path / "folder")
    shard = folder / "model-00001-of-00002.safetensors"
    shard.rename(tmp_path / "elsewhere.safetensors")
    shard.symlink_to(tmp_path / "elsewhere.safetensors")
    refused(folder, shard.name, "outside the folder")


def test_index_says_a_tensor_is_where_it_is_not(tmp_path):
    folder = sharded(tmp_path, **{"model.nowhere": "model-00001-of-00002.safetensors"})
    refused(folder, "model.nowhere", "model-00001-of-00002.safetensors")


def test_two_shards_hold_the_same(tmp_path):
    folder = sharded(tmp_path)
    first, copy = folder / "model-00001-of-00002.safetensors", folder / "copy.safetensors"
    copy.write_bytes(first.read_bytes())
    refused(sharded(tmp_path, **{next(iter(stored_tensors_of(first))): copy.name}), "two shards")


def stored_tensors_of(path):
    length = int.from_bytes(path.read_bytes()[:8], "little")
    return json.loads(path.read_bytes()[8 : 8 + length])


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": {"a": 3}}'])
def test_index_is_none(tmp_path, index):
    folder = sharded(tmp_path)
    (folder / "model.safetensors.index.json").write_text(index)
    refused(folder, "model.safetensors.index.json")


def test_several_files_without_an_index(tmp_path):
    folder = sharded(tmp_path)
    (folder / "model.safetensors.index.json").unlink()
    refused(folder, "2 safetensors files", "model.safetensors.index.json")


def vocabulary(tmp_path, **changed):
    tensors = speculators_tensors() | changed
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return write(tmp_path, SPECULATORS, kept)


OFFSETS = speculators_tensors()["d2t"]
KEPT = speculators_tensors()["t2d"]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"d2t": None}, "no tensor d2t"),
        ({"lm_head.weight": None}, "no tensor lm_head.weight"),
        ({"lm_head.weight": np.zeros((40, 16), np.float32)}, "expected [7, 16]"),
        ({"d2t": OFFSETS.astype(np.float32)}, "d2t is F32"),
        ({"d2t": OFFSETS - 1}, "d2t leads to ids -1"),
        ({"d2t": OFFSETS + 2}, "to 40"),
        ({"d2t": -np.arange(7)}, "distinct"),
        ({"d2t": OFFSETS + 1}, "keep different ids"),
        ({"t2d": ~KEPT}, "keep different ids"),
        ({"t2d": KEPT[:-1]}, "t2d"),
        ({"t2d": KEPT.astype(np.int32)}, "t2d"),
    ],
)
def test_damaged_vocabulary(tmp_path, changed, named):
    refused(vocabulary(tmp_path, **changed), named, load=open_drafter)


def test_no_flags_of_the_kept_ids_are_needed(tmp_path):
    assert open_drafter(vocabulary(tmp_path, t2d=None)).config.draft_vocab_size == 7


def test_swapped_folders(tmp_path):
    target = write(tmp_path / "target", TARGET, target_tensors())
    drafter = write(tmp_path / "drafter", ZLAB, zlab_tensors())
    refused(drafter, "belongs to a drafter", load=open_target)
    refused(target, "expected a DFlash drafter", load=open_drafter)


def test_a_drafter_that_does_not_fit(tmp_path):
    folder = write(tmp_path / "drafter", ZLAB, zlab_tensors())
    config = TARGET | {"vocab_size": 39}
    target = open_target(write(tmp_path / "target", config, target_tensors(config))).config
    refused(folder, "vocab_size", load=lambda f: check_pair(target, open_drafter(f).config))


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    folder = write(tmp_path, TARGET, target_tensors())
    tensor = stored_tensors(folder)["lm_head.weight"]
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: tensor.offset + 3])
    refused(folder, "ended while it was read", load=lambda _: stream.read_tensor(tensor))


def test_a_fixture_that_works(tmp_path):
    folder = write(tmp_path, TARGET, target_tensors())
    with pytest.raises(AssertionError, match="weights were read"):
        open_target(folder).load(jnp.float32)
