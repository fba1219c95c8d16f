"""A step over two GPUs, compiled without any: with kernels, and no more sums than there must be."""

import dataclasses
import math
import re
import types
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from h100 import TARGETS, compiled, needs_compiler
from jax.experimental import topologies
from jax.experimental.mosaic.gpu import utils as mosaic_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.engine.setup.inboxes import WithInboxes
from jaxspec.engine.step import sharded
from jaxspec.engine.step.io import Drafting, Models
from jaxspec.engine.step.state import empty_state
from jaxspec.engine.step.steps import decode_step
from jaxspec.layers.kernels import SHARDED
from jaxspec.layers.shards import AXIS, Shards
from jaxspec.layers.sums import PSUM_ASKED_FOR
from jaxspec.models import sharding
from jaxspec.models.dflash import DFlash
from jaxspec.models.parameters import random_params
from jaxspec.models.presets import dflash_for, qwen3, qwen35
from jaxspec.models.qwen3 import Qwen3
from jaxspec.models.qwen35 import Qwen35
from jaxspec.proposers.dflash import DFlashProposer
from pallas_kernels import dispatch
from pallas_kernels.dense_chain import MORE_TOKENS
from pallas_kernels.exchange import Inboxes
from pallas_kernels.exchange.inboxes import BLOCKS

DEVICES, SLOTS, PAGE_SIZE, PAGES_PER_SLOT = 2, 8, 64, 16
TWO = Shards(DEVICES)
TARGET_LAYERS, DRAFTER_LAYERS = 3, 2

H100 = {
    "device_kind": "NVIDIA H100 80GB HBM3",
    "compute_capability": "9.0",
    "core_count": 132,
}
A100 = {
    "device_kind": "NVIDIA A100-SXM4-80GB",
    "compute_capability": "8.0",
    "core_count": 108,
}


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> Mesh:
    """Two H100s that are not here."""
    return two("h100", H100, monkeypatch)


def two(target: str, known: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Mesh:
    """Two GPUs of this kind that are not here. A process lowers equal calls of a kernel once, so
    they may not be those of a test for another kind."""
    found = topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        target_config=TARGETS.joinpath(f"{target}.txtpb").read_text(),
        topology=f"1x1x{DEVICES}",
    )
    mesh = Mesh(np.array(found.devices), (AXIS,))
    for module in (sharding, sharded):
        monkeypatch.setattr(module, "mesh_of", lambda count: mesh)
    device = types.SimpleNamespace(platform="gpu", **known)
    monkeypatch.setattr(dispatch, "default_device", lambda: device)
    capability = dispatch.capability(device.compute_capability)
    monkeypatch.setattr(mosaic_utils, "_infer_arch", lambda: capability)
    return mesh


def spread(model, shards: Shards) -> tuple:
    """One device's shard of a model, and the shapes of all parameters where they lie."""
    shapes = flatten_dict(jax.eval_shape(lambda: random_params(model, jax.random.key(0))), sep="/")
    own = model.with_shards(shards)
    places = sharding.placements(own, shards)
    params = {
        path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=places[path].sharding)
        for path, x in shapes.items()
    }
    return own, unflatten_dict(params, sep="/")


def state_of(models: Models, mesh: Mesh):
    """The shapes of the whole state, with the heads of all devices."""
    sizes = SLOTS, SLOTS * PAGES_PER_SLOT + 1, PAGES_PER_SLOT, PAGES_PER_SLOT * PAGE_SIZE
    of_shard = jax.eval_shape(lambda: with_inboxes(empty_state(models, *sizes), models))

    def whole(leaf, spec: PartitionSpec):
        factors = [DEVICES if axis == AXIS else 1 for axis in spec] + [1] * leaf.ndim
        shape = tuple(size * factor for size, factor in zip(leaf.shape, factors))
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    wholes = lambda spec, part: jax.tree.map(lambda leaf: whole(leaf, spec), part)
    return jax.tree.map(wholes, sharded.specs_of_state(of_shard), of_shard)


def with_inboxes(state, models: Models):
    """The state of one shard, with inboxes for both models if they exchange by them."""
    if models.shards.exchange == "psum":
        return state
    words, zeros = jnp.zeros((DEVICES, 2), jnp.uint32), partial(jnp.zeros, dtype=jnp.int32)
    room = WithInboxes(lambda: state, models).room
    inboxes = Inboxes(words, zeros(1), zeros(()), zeros(BLOCKS), room)
    given = lambda cache: dataclasses.replace(cache, inboxes=inboxes)
    [drafter] = state.proposers
    return dataclasses.replace(state, cache=given(state.cache), proposers=(given(drafter),))


def compiled_step(
    target, draft, mesh: Mesh, draws: bool = False, shards: Shards = TWO, batch: int = SLOTS
) -> tuple[str, Models]:
    """The text of a decode step of these models, and the models of one shard."""
    target, of_target = spread(target, shards)
    drafter, of_drafter = spread(DFlash(draft, jnp.bfloat16), shards)
    models = Models(target, (DFlashProposer(drafter),), PAGE_SIZE)
    params = {"target": of_target, "drafter": of_drafter}
    state = state_of(models, mesh)
    everywhere = NamedSharding(mesh, PartitionSpec())
    integers = jax.ShapeDtypeStruct((batch,), jnp.int32, sharding=everywhere)
    static = {"drafting": Drafting(0, draft.block_size, drawn=draws), "draws": draws}
    inputs = integers, integers
    step = sharded.step_over_shards(decode_step, models, params, state, inputs, static)
    traced = step.trace(params, state, *inputs)
    return compiled(traced.lower(lowering_platforms=("cuda",))).as_text(), models


def drafter_of(config, layer_ids: tuple[int, ...]):
    draft = dflash_for(config, num_layers=DRAFTER_LAYERS)
    return dataclasses.replace(draft, target_layer_ids=layer_ids)


def kernels_in(text: str) -> int:
    return len(re.findall(r'custom_call_target="mosaic_gpu', text))


def sums_in(text: str) -> int:
    return len(re.findall(r" all-reduce(?:-start)?\(", text))


def said_of(target, width: int) -> dict[str, str]:
    """What the engine says of each op of the target: what runs it, or why no kernel does."""
    choices = dict(target.kernel_choices(SLOTS, width, PAGE_SIZE))
    return {op: choice.reason or choice.implementation for op, choice in choices.items()}


@needs_compiler
@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-8b-fp8"])
def test_a_step_over_two_gpus(mesh, name):
    config = qwen3(name)
    decoder = dataclasses.replace(config.decoder, num_layers=TARGET_LAYERS)
    config = dataclasses.replace(config, decoder=decoder)
    draft = drafter_of(config, (0, 1))
    text, models = compiled_step(Qwen3(config, (0, 1), jnp.bfloat16), draft, mesh)
    layers = TARGET_LAYERS + DRAFTER_LAYERS
    products = 4 * TARGET_LAYERS if config.decoder.fp8 else 0
    assert kernels_in(text) == 2 * layers + DRAFTER_LAYERS + products, (
        "queries, attention, and context; each product with a matrix in 8 bits"
    )
    assert sums_in(text) == 2 * layers, "two per layer"
    said = said_of(models.target, draft.block_size)
    assert said["dense_chain"] == SHARDED and said["paged_attention"] == "mosaic"
    assert said.get("fp8_product", "mosaic") == "mosaic"


@needs_compiler
@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-8b-fp8"])
def test_a_step_over_two_gpus_other_than_hopper(name, monkeypatch):
    config = qwen3(name)
    decoder = dataclasses.replace(config.decoder, num_layers=2)
    config = dataclasses.replace(config, decoder=decoder)
    draft, shards = drafter_of(config, (0, 1)), Shards(DEVICES, exchange="auto")
    text, models = compiled_step(
        Qwen3(config, (0, 1), jnp.bfloat16), draft, two("a100", A100, monkeypatch), shards=shards
    )
    layers = 2 + DRAFTER_LAYERS
    assert kernels_in(text) == 2 * layers + DRAFTER_LAYERS, "queries, attention, and context"
    assert sums_in(text) == 2 * layers, "two per layer"
    said = said_of(models.target, draft.block_size)
    assert said["qkv_write"] == said["paged_attention"] == "portable"
    here = "the device is NVIDIA A100-SXM4-80GB (compute capability 8.0)"
    assert said["dense_chain"].startswith(here)
    assert said.get("fp8_product", here).startswith(here)
    assert said["exchange_norm"].startswith("not tried on NVIDIA A100-SXM4-80GB")


@needs_compiler
def test_a_step_whose_sums_are_in_kernels(mesh):
    config = qwen3("qwen3-8b")
    decoder = dataclasses.replace(config.decoder, num_layers=2)
    config = dataclasses.replace(config, decoder=decoder)
    target, shards = Qwen3(config, (0, 1), jnp.bfloat16), Shards(DEVICES, exchange="mosaic")
    text, _ = compiled_step(target, drafter_of(config, (0, 1)), mesh, shards=shards)
    layers = 2 + DRAFTER_LAYERS
    assert kernels_in(text) == 4 * layers + DRAFTER_LAYERS, (
        "queries, attention, and two sums; of the drafter, context too"
    )
    assert sums_in(text) == 0
    assert not re.findall(r"s32\[128\]\S* copy\(", text), "what is known of lateness stays"


@needs_compiler
@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-8b-fp8", "qwen3-32b"])
def test_a_step_of_few_tokens_has_one_kernel_between_attentions(mesh, name):
    config = qwen3(name)
    decoder = dataclasses.replace(config.decoder, num_layers=2)
    config = dataclasses.replace(config, decoder=decoder)
    target, shards = Qwen3(config, (0, 1), jnp.bfloat16), Shards(DEVICES, exchange="auto")
    draft, layers = drafter_of(config, (0, 1)), 2 + DRAFTER_LAYERS
    text, models = compiled_step(target, draft, mesh, shards=shards, batch=4)
    first_qkv = 1 if decoder.fp8 else 0
    assert kernels_in(text) == 3 * layers + DRAFTER_LAYERS + first_qkv, (
        "queries, attention, and everything else; of the drafter, context too"
    )
    assert sums_in(text) == 0
    said = dict(models.target.kernel_choices(4, draft.block_size, PAGE_SIZE))
    assert said["dense_chain"].implementation == "mosaic" and "exchange_norm" not in said


def most_gathered(text: str) -> int:
    """Bytes of the largest array that devices gather; parts are gathered as bytes."""
    gathers = re.findall(r"= \(?(.*?) all-gather(?:-start)?\(", text)
    shapes = [shape for line in gathers for shape in re.findall(r"u8\[([\d,]+)\]", line)]
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


@needs_compiler
def test_a_step_that_samples_gathers_few_numbers_of_each_token(mesh):
    config = qwen3("qwen3-8b")
    config = dataclasses.replace(config, decoder=dataclasses.replace(config.decoder, num_layers=2))
    draft = drafter_of(config, (0, 1))
    text, _ = compiled_step(Qwen3(config, (0, 1), jnp.bfloat16), draft, mesh, draws=True)
    rows = SLOTS * (2 * draft.block_size - 1)  # of the target, and of the drafter
    assert rows * 64 * 8 <= most_gathered(text) <= DEVICES * rows * 64 * 8
    assert 100 * most_gathered(text) < rows * config.vocab_size * 4, "not the logits"


def hybrid_of_four_layers():
    config = qwen35("qwen3.5-4b")
    decoder = dataclasses.replace(config.decoder, num_layers=4)
    return dataclasses.replace(config, decoder=decoder, layer_kinds=config.layer_kinds[:4])


@needs_compiler
@pytest.mark.parametrize("exchange", ["psum", "mosaic"])
def test_a_step_of_a_hybrid_over_two_gpus(mesh, exchange):
    config, shards = hybrid_of_four_layers(), Shards(DEVICES, exchange=exchange)
    draft = drafter_of(config, (0, 1))
    text, models = compiled_step(Qwen35(config, (0, 1), jnp.bfloat16), draft, mesh, shards=shards)
    attending, recurrent = 1 + DRAFTER_LAYERS, 3
    sums = 2 * (attending + recurrent)
    in_kernels = sums if exchange == "mosaic" else 0
    assert kernels_in(text) == 2 * attending + DRAFTER_LAYERS + recurrent + 1 + in_kernels, (
        "queries, attention, and context; reading a block; folding in what all keep of it; sums"
    )
    assert sums_in(text) == sums - in_kernels + 2, (
        "two per layer, one per embedding, which is also the head"
    )
    said = said_of(models.target, draft.block_size)
    kernels = ("paged_attention", "block_read", "block_fold", "delta_prefill")
    assert {said[op] for op in kernels} == {"mosaic"}
    assert said["dense_chain"] == (MORE_TOKENS if exchange == "mosaic" else SHARDED)
    assert said["exchange_norm"] == ("mosaic" if exchange == "mosaic" else PSUM_ASKED_FOR)
