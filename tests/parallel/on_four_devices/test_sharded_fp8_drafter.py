"""Drafters in FP8 on two devices, each with its part of numbers and scales."""

import dataclasses
import logging
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from golden_pair import GOLDENS, HOUSE, budget, trajectories

from jaxspec.engine.engine import Engine
from jaxspec.engine.plan.shards import with_shards
from jaxspec.engine.setup.load_models import open_models
from jaxspec.engine.setup.opened import Opened
from jaxspec.engine.setup.placement import spread_params
from jaxspec.errors import UsageError
from jaxspec.layers.shards import Shards
from oracles.more_heads import with_more_heads

TARGET, DRAFT = (GOLDENS / "a" / name for name in ("target", "draft"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    """The golden drafter in sizes of which each of two devices gets whole blocks."""
    place = tmp_path_factory.mktemp("drafter")
    return with_more_heads(DRAFT, place, query_copies=2, kv_copies=4, inner=512)


def opened(folder: pathlib.Path, devices: int) -> Opened:
    options = {"dtype": "float32", "draft_quantization": "fp8"}
    return open_models(TARGET, folder, tensor_parallel_size=devices, **options)


def without_copied_head(pair: Opened) -> Opened:
    [proposer] = pair.models.proposers
    config = dataclasses.replace(proposer.drafter.config, copies_head=False)
    proposer = dataclasses.replace(proposer, drafter=proposer.drafter.clone(config=config))
    models = dataclasses.replace(pair.models, proposers=(proposer,))
    return dataclasses.replace(pair, models=models)


def test_drafts_are_those_of_one_device_without_a_copy_of_the_head(folder):
    """Two devices have no copy, also if one device that has opened the models made one."""
    cases, whole = trajectories("a")[:5], opened(folder, 1)
    outputs = []
    for pair, devices in (
        (without_copied_head(whole), 1),
        (opened(folder, 2), 2),
        (whole, 2),
    ):
        options = HOUSE | {"tensor_parallel_size": devices, "driver": "overlapped"}
        engine = Engine.from_models(pair.models, pair.params, pair.tokenizer, **options)
        outputs.append(engine.generate([case["prompt"] for case in cases], budget(40)))
        assert "a drafter in FP8" in repr(engine)
        [proposer] = engine.loop.device.models.proposers
        assert not proposer.drafter.config.copies_head
        assert devices == 1 or "copied_head" not in engine.params["drafter"]
    for case, *several in zip(cases, *outputs, strict=True):
        lengths = {one.stats.acceptance_lengths for one in several}
        assert all(list(one.token_ids) == case["greedy"][:40] for one in several)
        assert len(lengths) == 1
    assert max(one.stats.mean_acceptance_length for one in outputs[1]) > 2


def test_the_log_says_that_the_head_is_not_copied(folder, caplog):
    with caplog.at_level(logging.INFO, "jaxspec"):
        assert not opened(folder, 2).drafter.config.copies_head
    said = "draft_quantization leaves the head as it is: there are 2 devices, expected one"
    assert said in caplog.messages


def test_each_device_reads_its_own_blocks(folder):
    whole, read = opened(folder, 1), opened(folder, 2)
    expected = spread_params(with_shards(whole.models, Shards(2)), whole.params)["drafter"]
    expected, found = (flatten_dict(one, sep="/") for one in (expected, read.params["drafter"]))
    assert found.keys() == expected.keys()
    for path, array in expected.items():
        assert found[path].sharding == array.sharding and found[path].dtype == array.dtype, path
        assert np.asarray(found[path]).tobytes() == np.asarray(array).tobytes(), path
    weight, scales = (found[f"layers_0/mlp/down/{name}"] for name in ("weight", "scales"))
    assert weight.dtype == jnp.float8_e4m3fn
    assert weight.addressable_shards[1].data.shape == (128, 256)
    assert scales.addressable_shards[1].data.shape == (1, 2)


def test_a_cut_through_a_block_is_refused(tmp_path):
    with pytest.raises(UsageError) as refusal:
        opened(with_more_heads(DRAFT, tmp_path), 2)
    assert str(refusal.value) == (
        "tensor_parallel_size is 2, so each device would get 192 of the drafter's "
        "intermediate_size 384; expected a multiple of 128, as FP8 weights in blocks of 128x128 "
        "need it; choose fewer, or a drafter in 16 bits"
    )
