"""Parameters know their axes, and products of shards are the product: beside each other where
outputs are cut, added up where inputs are."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.layers.axes import Axis, sections_of, shard_of, size_of
from jaxspec.layers.decoder import Decoder
from jaxspec.models import presets, shapes
from jaxspec.models.dflash import DFlash
from jaxspec.models.parameters import parameter_axes, parameter_shapes
from jaxspec.models.qwen3 import Qwen3

CUT = ("heads", "kv_heads", "inner", "vocab")
SMALLER = 64
"""How much narrower than the published models these are, in the same proportions."""


def narrow(name: str) -> Decoder:
    """Heads and their numbers stay, so that everything is cut where it would be."""
    decoder = presets.qwen3(name).decoder
    return dataclasses.replace(
        decoder,
        hidden_size=decoder.hidden_size // SMALLER,
        intermediate_size=decoder.intermediate_size // SMALLER,
        head_dim=2,
    )


def matrices(decoder: Decoder) -> dict:
    """Axes of a layer's matrices and of the head, whole sizes where every axis is narrower."""
    vocab = Axis("vocab", presets.VOCABULARY // 32)
    return {
        "qkv": (decoder.hidden, decoder.fused),
        "out": (decoder.attended, decoder.hidden),
        "gate_up": (decoder.hidden, (decoder.inner, decoder.inner)),
        "down": (decoder.inner, decoder.hidden),
        "head": (decoder.hidden, vocab),
    }


def joined(outputs: list, sections, cut: tuple[str, ...]) -> np.ndarray:
    """Outputs of all shards in the order of the whole matrix: section by section."""
    shares = [section.size // (len(outputs) if section.name in cut else 1) for section in sections]
    pieces = [np.split(np.asarray(y), np.cumsum(shares)[:-1], axis=-1) for y in outputs]
    return np.concatenate([np.concatenate(of_section, -1) for of_section in zip(*pieces)], -1)


@pytest.mark.parametrize("name", [name for name in (*shapes.QWEN3, *shapes.FP8) if name != "tiny"])
@pytest.mark.parametrize("shards", [1, 2, 4])
def test_products_of_shards_make_the_product(name, shards):
    for axes in matrices(narrow(name)).values():
        inputs, outputs = axes
        matrix = jax.random.normal(jax.random.key(0), (size_of(inputs), size_of(outputs)))
        x = jax.random.normal(jax.random.key(1), (3, size_of(inputs)))
        whole = x @ matrix
        if inputs.name in CUT:
            parts = [
                shard_of(x, (Axis("tokens", 3), inputs), CUT, i, shards)
                @ shard_of(matrix, axes, CUT, i, shards)
                for i in range(shards)
            ]
            np.testing.assert_allclose(sum(parts), whole, rtol=1e-4, atol=1e-4)
        else:
            parts = [x @ shard_of(matrix, axes, CUT, i, shards) for i in range(shards)]
            found = joined(parts, sections_of(outputs), CUT)
            np.testing.assert_allclose(found, whole, rtol=1e-5, atol=1e-5)


def test_scales_go_with_the_numbers_that_they_scale():
    block, hidden, inner = 128, Axis("hidden", 256), Axis("inner", 1024)
    axes = hidden, (inner, inner)
    matrix = jax.random.normal(jax.random.key(0), (256, 2048))
    scales = jax.random.normal(jax.random.key(1), (256 // block, 2048 // block))
    scaled = lambda matrix, scales: matrix * scales.repeat(block, 0).repeat(block, 1)
    for i in range(4):
        shard = shard_of(scaled(matrix, scales), axes, CUT, i, 4)
        numbers = shard_of(matrix, axes, CUT, i, 4)
        again = scaled(numbers, shard_of(scales, axes, CUT, i, 4, block=block))
        np.testing.assert_array_equal(shard, again)


def test_heads_and_blocks_are_not_cut_apart():
    heads = Axis("heads", 6 * 128, unit=128)
    with pytest.raises(ValueError, match="heads has 768 numbers in units of 128"):
        shard_of(jnp.zeros((6 * 128,)), (heads,), CUT, 0, 4)
    with pytest.raises(ValueError, match="blocks of 128"):
        shard_of(jnp.zeros((6,)), (Axis("inner", 768),), CUT, 0, 4, block=128)


@pytest.mark.parametrize("owns_vocabulary", [False, True])
def test_every_parameter_says_its_axes(owns_vocabulary):
    config = presets.qwen3("tiny")
    drafter = presets.dflash_for(config, num_layers=2)
    if owns_vocabulary:
        config = dataclasses.replace(config, tie_word_embeddings=False)
        own = {"owns_embedding": True, "owns_head": True, "draft_vocab_size": 1000}
        drafter = dataclasses.replace(drafter, **own)
    for model in (Qwen3(config), DFlash(drafter)):
        axes, shapes = parameter_axes(model), parameter_shapes(model)
        assert axes.keys() == shapes.keys()
        assert {path: shape.shape for path, shape in shapes.items()} == {
            path: tuple(map(size_of, of_parameter)) for path, of_parameter in axes.items()
        }
    names = lambda path: [[s.name for s in sections_of(axis)] for axis in axes[path]]
    assert names("layers_1/attention/qkv/kernel") == [["hidden"], ["heads", "kv_heads", "kv_heads"]]
    assert names("layers_0/mlp/down/kernel") == [["inner"], ["hidden"]]
    assert names("feature_projection/kernel") == [["features"], ["hidden"]]
    if owns_vocabulary:
        assert names("target_ids") == [["draft_vocab"]]
        assert names("head/kernel") == [["hidden"], ["draft_vocab"]]
