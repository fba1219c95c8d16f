"""One decoder layer by itself: its formula in NumPy, and the same numbers however it attends."""

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import meta

from jaxspec.cache.block import block_after
from jaxspec.cache.keys_values import empty_pages
from jaxspec.layers.decoder import BlockMask, Decoder, DecoderLayer
from jaxspec.layers.paged import paged
from jaxspec.layers.rope import Rope
from jaxspec.models.whole_sequences import blocks_at

GEOMETRY = Decoder(32, 48, 1, 4, 2, 8, 1e-6, Rope(1e4), 64)
LAYER = DecoderLayer(GEOMETRY, BlockMask(causal=True))
BATCH, WIDTH = 2, 5
X = jax.random.normal(jax.random.key(0), (BATCH, WIDTH, 32))
START = jnp.zeros(BATCH, jnp.int32)
WHOLE = blocks_at(START[:, None], WIDTH, X[:, :0], GEOMETRY)


def attend_to_nothing(attention, qkv, memory):
    """Not even attention: the values of the heads that share them, in place of what they see."""
    g = attention.geometry
    heads = qkv.reshape(*qkv.shape[:2], -1, g.head_dim)
    values = heads[:, :, g.num_heads + g.num_kv_heads :]
    return values.repeat(g.num_heads // g.num_kv_heads, axis=2).reshape(*X.shape), memory + 1


def params() -> dict:
    described = LAYER.init(jax.random.key(1), X, WHOLE, None)["params"]
    leaves, tree = jax.tree.flatten(meta.unbox(described))
    keys = jax.random.split(jax.random.key(2), len(leaves))
    noisy = [leaf + 0.1 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys)]
    return jax.tree.unflatten(tree, noisy)


def by_hand(params, x):
    def norm(x, scale):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + GEOMETRY.rms_norm_eps) * scale

    attention, mlp = params["attention"], params["mlp"]
    qkv = norm(x, attention["norm"]["scale"]) @ attention["qkv"]["kernel"]
    attended, _ = attend_to_nothing(LAYER, qkv, 0)
    x = x + attended @ attention["out"]["kernel"]
    gate, up = np.split(norm(x, mlp["norm"]["scale"]) @ mlp["gate_up"]["kernel"], 2, axis=-1)
    return x + (gate / (1 + np.exp(-gate)) * up) @ mlp["down"]["kernel"]


def test_the_formula():
    weights = params()
    out, memory = LAYER.apply({"params": weights}, X, attend_to_nothing, 0)
    assert memory == 1
    expected = by_hand(jax.tree.map(np.asarray, weights), np.asarray(X))
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)


def test_pages_and_whole_sequences_give_the_same():
    variables = {"params": params()}
    expected, _ = LAYER.apply(variables, X, WHOLE, None)

    table = 1 + jnp.arange(BATCH, dtype=jnp.int32)[:, None]
    block = block_after(jnp.arange(BATCH), START, START + WIDTH, table, WIDTH, page_size=8)
    pages = empty_pages(BATCH + 1, 8, GEOMETRY.num_kv_heads, GEOMETRY.head_dim, jnp.float32)
    found, written = LAYER.apply(variables, X, paged(GEOMETRY, block, "xla"), pages)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert written.keys.shape == pages.keys.shape and jnp.any(written.keys != 0)
