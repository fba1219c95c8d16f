"""What is said of sums over several devices is what happens when a step is traced."""

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from test_kernel_choices import HOPPER, block_of, shallow, zeros

from jaxspec.cache.packing import packing_of
from jaxspec.layers.shards import AXIS, Shards
from jaxspec.layers.sums import CONVOLVED, MOST_TOKENS, room_for, shape_of_inboxes
from jaxspec.models.dflash import DFlash
from jaxspec.models.parameters import parameter_shapes
from jaxspec.models.presets import dflash2_for, qwen35
from jaxspec.models.qwen3 import Qwen3
from jaxspec.models.qwen35 import Qwen35
from pallas_kernels import NotForThisKernel, dispatch
from pallas_kernels.dispatch import Choice, Op

TWO = Shards(2, exchange="mosaic")
CHAIN = "chain"
"""The kernel from one attention to the next adds up itself, both sums of a layer."""


def traced(monkeypatch, run) -> dict[str, int]:
    """By what a step that is traced on each of two devices adds up, and how often."""
    counts: Counter[str] = Counter()

    def noted(op: Op, implementation, *args, **options):
        choice = op.choice(implementation, *args, **options)
        if op.name in ("exchange_norm", "exchanging_chain"):
            counts[CHAIN if op.name == "exchanging_chain" else choice.implementation] += 1
        return op.implementations["xla"](*args, **options)

    def summed(shards: Shards, x):
        if shards.count > 1:
            counts["psum"] += 1
        return x

    monkeypatch.setattr(Op, "__call__", noted)
    monkeypatch.setattr(Shards, "summed", summed)
    jax.eval_shape(jax.vmap(lambda _: run(), axis_name=AXIS), jnp.zeros(TWO.count))
    return counts


def with_inboxes(model, cache):
    decoder = model.config.decoder
    shapes = shape_of_inboxes(TWO.count, room_for(decoder, model.dtype))
    inboxes = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return dataclasses.replace(cache, inboxes=inboxes)


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dispatch, "default_device", lambda: HOPPER)


def sums_of_target(model, batch: int, width: int, monkeypatch, num_packed=None) -> dict[str, int]:
    shapes = parameter_shapes(model)

    def run():
        block, cache = block_of(batch, width, 64), model.new_cache(batch, 2, 64)
        packed = () if num_packed is None else (packing_of(block.lengths, width, num_packed),)
        given = block.positions, block, with_inboxes(model, cache), *packed
        return model.apply(zeros(shapes), *given)

    return traced(monkeypatch, run)


@pytest.mark.parametrize(
    ("batch", "width", "num_packed", "runs_on"),
    [
        (1, 1, None, CHAIN),
        (4, 16, None, CHAIN),
        (8, 16, 64, CHAIN),
        (4, MOST_TOKENS // 4, None, "mosaic"),
        (3, MOST_TOKENS // 3 + 1, None, "psum"),
        (64, 16, 256, "mosaic"),
        (64, 16, None, "psum"),
    ],
)
def test_a_target_adds_up_as_it_says(batch, width, num_packed, runs_on, monkeypatch):
    config = shallow("qwen3-4b")[0]
    model = Qwen3(config, (), jnp.bfloat16).with_shards(TWO)
    sizes = (batch, width, 64) if num_packed is None else (batch, width, 64, num_packed)
    said = dict(model.kernel_choices(*sizes))
    if runs_on == CHAIN:
        assert said["dense_chain"] == Choice("mosaic") and "exchange_norm" not in said
    else:
        assert said["exchange_norm"].implementation == runs_on
        assert said["dense_chain"].implementation == "xla"
    sums_each = 1 if runs_on == CHAIN else 2
    of_layers = {runs_on: sums_each * config.decoder.num_layers}
    found = sums_of_target(model, batch, width, monkeypatch, num_packed)
    assert found == {**of_layers, "psum": of_layers.get("psum", 0) + 1}, "one of the embedding"


@pytest.mark.parametrize(("width", "runs_on"), [(16, "mosaic"), (128, "psum")])
def test_a_hybrid_does_too(width, runs_on, monkeypatch):
    config = qwen35("qwen3.5-4b")
    kinds = ("delta", "attention")
    config = dataclasses.replace(config, vocab_size=128, layer_kinds=kinds)
    model = Qwen35(config, (), jnp.bfloat16).with_shards(TWO)
    said = dict(model.kernel_choices(8, width, 64))["exchange_norm"]
    assert said.implementation == runs_on
    found = sums_of_target(model, 8, width, monkeypatch)
    of_layers = {runs_on: 2 * len(kinds)}
    assert found == {**of_layers, "psum": of_layers.get("psum", 0) + 1}, "one of the embedding"


def sums_of_drafter(model, batch: int, monkeypatch) -> dict[str, int]:
    shapes, hidden = parameter_shapes(model), model.config.decoder.hidden_size

    def run():
        block, cache = block_of(batch, 16, 64), model.new_cache(batch, 2, 64)
        embedded = jnp.zeros((batch, 16, hidden), jnp.bfloat16)
        return model.apply(zeros(shapes), embedded, block, with_inboxes(model, cache))

    return traced(monkeypatch, run)


def test_a_drafter_of_few_tokens_adds_up_in_the_chain(monkeypatch):
    model = DFlash(shallow("qwen3-4b")[1], jnp.bfloat16).with_shards(TWO)
    said = dict(model.kernel_choices(4, 1, 64))
    assert said["dense_chain"] == Choice("mosaic") and "exchange_norm" not in said
    assert sums_of_drafter(model, 4, monkeypatch) == {CHAIN: len(model.config.block_masks)}


@pytest.mark.parametrize(("batch", "runs_on"), [(32, "mosaic"), (33, "psum")])
def test_a_drafter_does_too(batch, runs_on, monkeypatch):
    model = DFlash(shallow("qwen3-4b")[1], jnp.bfloat16).with_shards(TWO)
    assert dict(model.kernel_choices(batch, 1, 64))["exchange_norm"].implementation == runs_on
    num_layers = len(model.config.block_masks)
    assert sums_of_drafter(model, batch, monkeypatch) == {runs_on: 2 * num_layers}


@pytest.mark.parametrize("exchange", ["xla", "mosaic"])
def test_convolutions_are_left_to_psum_or_refused(exchange, monkeypatch):
    config = dataclasses.replace(
        dflash2_for(shallow("qwen3-4b")[0]), vocab_size=128, transition=None
    )
    model = DFlash(config, jnp.bfloat16).with_shards(Shards(2, exchange=exchange))
    if exchange == "mosaic":
        for asked in (
            lambda: dict(model.kernel_choices(4, 1, 64)),
            lambda: sums_of_drafter(model, 4, monkeypatch),
        ):
            with pytest.raises(NotForThisKernel, match=CONVOLVED):
                asked()
        return
    said = dict(model.kernel_choices(4, 1, 64))["exchange_norm"]
    assert (said.implementation, said.reason) == ("psum", CONVOLVED)
    found = sums_of_drafter(model, 4, monkeypatch)
    assert found == {"psum": 2 * len(config.block_masks)}


def test_one_device_has_nothing_to_add_up():
    model = Qwen3(shallow("qwen3-4b")[0], (), jnp.bfloat16)
    assert "exchange_norm" not in dict(model.kernel_choices(4, 16, 64))
