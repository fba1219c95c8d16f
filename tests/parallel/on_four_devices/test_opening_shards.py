"""Weights are read to the device that keeps them, and what cannot be spread is refused by name."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from golden_pair import GOLDENS, golden_engine, opened
from jax.sharding import SingleDeviceSharding
from trained_hybrid_pair import PAIR
from wide_models import wide_engine, wide_models

from jaxspec.checkpoint import stream
from jaxspec.checkpoint.conversion import convert
from jaxspec.engine.engine import Engine
from jaxspec.engine.plan.shards import with_shards
from jaxspec.engine.setup.load_models import open_models
from jaxspec.engine.setup.placement import spread_params
from jaxspec.engine.step.io import Models
from jaxspec.errors import UsageError
from jaxspec.layers.axes import shard_of
from jaxspec.layers.shards import Shards
from jaxspec.measure.engines import random_pair
from jaxspec.models.parameters import parameter_axes
from jaxspec.proposers.lookup import Lookup

CUT = {"attention/qkv", "attention/out", "mlp/gate_up", "mlp/down"}


def flat(params: Any) -> dict:
    return flatten_dict(params, sep="/")


def golden_folders(which: str):
    return GOLDENS / "a" / "target", GOLDENS / which / "draft"


def same(found: Any, expected: Any) -> None:
    assert flat(found).keys() == flat(expected).keys()
    for path, array in flat(expected).items():
        read = flat(found)[path]
        assert read.sharding == array.sharding, path
        assert np.array_equal(np.asarray(read), np.asarray(array)), path


@pytest.mark.parametrize("which", ["as", "eagle3", "dspark"])
@pytest.mark.parametrize("piece_bytes", [5000, 2**26])
def test_reading_to_shards_gives_what_cutting_gives(which, piece_bytes, monkeypatch):
    monkeypatch.setattr(stream, "PIECE_BYTES", piece_bytes)
    models = with_shards(opened(which).models, Shards(2))
    expected = spread_params(models, opened(which).params)
    found = open_models(*golden_folders(which), dtype="float32", tensor_parallel_size=2)
    same(found.params, expected)


def test_every_device_gets_its_heads():
    """Of a fused matrix a device has its own part of every section."""
    whole, target = opened("a").params["target"], opened("a").models.target
    read = open_models(*golden_folders("a"), dtype="float32", tensor_parallel_size=2)
    found, axes = flat(read.params["target"]), parameter_axes(target)
    cut = ("heads", "kv_heads", "inner", "vocab")
    for path, array in flat(whole).items():
        for index, shard in enumerate(found[path].addressable_shards):
            expected = shard_of(array, axes[path], cut, index, 2)
            assert np.array_equal(shard.data, expected), path
    in_shards = {path for path in found if not found[path].is_fully_replicated}
    assert {"/".join(path.split("/")[1:3]) for path in in_shards} == CUT | {"embedding"}


def test_converted_checkpoints_are_read_to_shards_too(tmp_path):
    converted = tmp_path / "target", tmp_path / "draft"
    for folder, to in zip(golden_folders("as"), converted):
        convert(folder, to)
    expected = open_models(*golden_folders("as"), dtype="float32", tensor_parallel_size=2)
    same(open_models(*converted, dtype="float32", tensor_parallel_size=2).params, expected.params)


@pytest.mark.parametrize("which", ["dflash", "fp8-channel", "hybrid"])
def test_a_piece_is_cut_before_it_goes_to_a_device(which, monkeypatch):
    """No device, and no copy in the host's memory, gets more of a matrix than a shard."""
    put, sizes = jax.device_put, []

    def noting(array, device=None, **settings):
        if isinstance(device, jax.Device):
            sizes.append(array.size)
        return put(array, device, **settings)

    monkeypatch.setattr(jax, "device_put", noting)
    folders = {
        "dflash": golden_folders("a"),
        "fp8-channel": (GOLDENS / "fp8-channel" / "target",),
        "hybrid": (PAIR / "target",),
    }
    read = open_models(*folders[which], dtype="float32", tensor_parallel_size=2)
    part = lambda a: a.size if a.is_fully_replicated else a.size // 2
    parts = [part(array) for array in flat(read.params).values() for _ in range(2)]
    assert sorted(sizes) == sorted(parts)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (4, "num_key_value_heads 2; expected a divisor of it"),
        (3, "num_attention_heads 4; expected a divisor of it"),
        (5, "jax sees 4 CPUs; expected at most 4"),
        (0, "tensor_parallel_size is 0; expected at least 1"),
        (2**40, "expected an integer below"),
    ],
)
def test_numbers_that_cannot_be(size, message):
    with pytest.raises(UsageError, match=message):
        golden_engine(tensor_parallel_size=size)
    if size < 2**31:
        with pytest.raises(UsageError, match=message):
            folders = golden_folders("a")
            Engine.from_pretrained(*folders, dtype="float32", tensor_parallel_size=size)


def test_a_drafter_s_vocabulary_is_named():
    models = wide_models("eagle3").models
    [proposer] = models.proposers
    config = dataclasses.replace(proposer.drafter.config, draft_vocab_size=255)
    other = dataclasses.replace(proposer, drafter=proposer.drafter.clone(config=config))
    with pytest.raises(UsageError, match="the drafter has draft_vocab_size 255"):
        with_shards(dataclasses.replace(models, proposers=(other,)), Shards(2))


def test_a_model_of_one_s_own_is_refused():
    class Own:
        num_drafts, max_positions = 3, None
        new_state = propose = absorb = bytes_read = lambda *_, **__: None

    models = dataclasses.replace(wide_models().models, proposers=(Own(),))
    with pytest.raises(UsageError, match="the proposer Own has no `with_shards`"):
        with_shards(models, Shards(2))
    target = dataclasses.make_dataclass("OwnTarget", [])
    with_own = Models.__new__(Models)
    object.__setattr__(with_own, "target", target())
    object.__setattr__(with_own, "proposers", ())
    with pytest.raises(UsageError, match="the target is a OwnTarget; expected a Qwen3 or"):
        with_shards(with_own, Shards(2))
    lookup = Lookup(3, 3, 1, 2, "recent", 100)
    kept = with_shards(dataclasses.replace(models, proposers=(lookup,)), Shards(2))
    assert kept.proposers == (lookup,)


@pytest.mark.parametrize("name", ["key_heads", "value_heads"])
def test_heads_of_recurrent_layers_are_named(name):
    models = wide_models("hybrid").models
    config = models.target.config
    config = dataclasses.replace(config, delta=dataclasses.replace(config.delta, **{name: 6}))
    target = models.target.clone(config=config)
    with pytest.raises(UsageError, match=f"target has linear_num_{name} 6; expected a divisor"):
        with_shards(dataclasses.replace(models, target=target), Shards(4))


def test_parameters_for_another_number_are_refused():
    pair, spread = wide_models(), wide_engine(2).params
    for devices in (1, 4):
        with pytest.raises(UsageError, match="the parameters were opened for 2"):
            Engine.from_models(pair.models, spread, tensor_parallel_size=devices)


def test_one_device_stays_as_it_was():
    device = wide_engine(1).loop.device
    for leaf in jax.tree.leaves((device.params, device.state)):
        assert isinstance(leaf.sharding, SingleDeviceSharding)
    assert with_shards(wide_models().models, Shards(1)) is wide_models().models


@pytest.mark.parametrize("in_order", [False, True])
def test_the_first_of_equal_logits_wins_on_any_device(in_order):
    """And what is not a number is seen, whoever has it."""
    shards = Shards(4, in_order)
    logits = np.zeros((3, 1, 8), np.float32)
    logits[0, 0, [3, 6]] = 2
    logits[1, 0, 7] = np.nan
    found = jax.vmap(shards.likeliest, axis_name="shards", out_axes=0)(
        jnp.asarray(logits).reshape(3, 1, 4, 2).transpose(2, 0, 1, 3)
    )
    tokens, largest = map(np.asarray, found)
    assert (tokens[..., 0] == [3, 7, 0]).all() and tokens.shape == (4, 3, 1)
    assert (largest[:, 0, 0] == 2).all() and np.isnan(largest[:, 1, 0]).all()


def test_random_weights_are_spread_as_they_are_made():
    """So no device needs room for all of them, and the numbers are those of one device."""
    whole = random_pair("tiny", 8, jnp.float32)
    found = random_pair("tiny", 8, jnp.float32, devices=2)
    assert found.models.shards.count == 1  # the engine splits the models
    expected = spread_params(with_shards(whole.models, Shards(2)), whole.params)
    same(found.params, expected)
    for name in "target", "drafter":
        cut = flat(found.params[name])["layers_0/mlp/down/kernel"]
        assert 2 * cut.addressable_shards[0].data.size == cut.size
