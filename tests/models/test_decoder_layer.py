"""One decoder layer by itself: its formula in NumPy, and the same numbers however it attends."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import meta

from jaxspec.cache.block import block_after
from jaxspec.cache.keys_values import empty_pages
from jaxspec.layers import fp8
from jaxspec.layers import paged as layers_paged
from jaxspec.layers.decoder import Attention, BlockMask, Decoder, DecoderLayer
from jaxspec.layers.fp8 import Fp8
from jaxspec.layers.paged import paged
from jaxspec.layers.rope import Rope
from jaxspec.models.whole_sequences import blocks_at
from pallas_kernels import fp8_product, qkv_write

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


def test_the_context_s_keys_are_written_from_parts(monkeypatch):
    """A product in 8 bits leaves its parts to the kernel that writes them: the sum is the same."""
    geometry = dataclasses.replace(GEOMETRY, hidden_size=256, head_dim=64, fp8=Fp8(blocks=True))
    attention = Attention(geometry, BlockMask(causal=False), jnp.float32)
    context = jax.random.normal(jax.random.key(0), (BATCH, WIDTH, 256))
    pages = empty_pages(BATCH + 1, 16, 2, 64, jnp.float32)
    block = block_after(jnp.arange(BATCH), START, START + WIDTH, 1 + START[:, None], WIDTH, 16)
    decoder_paged = paged(geometry, block, "xla")
    write = lambda module, pages: decoder_paged.write_context(module, context, pages)
    variables = meta.unbox(attention.init(jax.random.key(1), pages, method=write))
    written = lambda: attention.apply(variables, pages, method=write)
    wanted, seen = written(), []

    def in_halves(x, weight, scales, **_):
        halves = [jnp.split(matrix, 2, axis=1) for matrix in (weight, scales)]
        rows = jnp.split(x, 2, axis=-1)
        return jnp.stack([fp8_product(*one) for one in zip(rows, *halves, strict=True)])

    def noted(qkv, *others, **options):
        seen.append(qkv.shape)
        return qkv_write(qkv, *others, **options)

    monkeypatch.setattr(fp8, "fp8_product_in_parts", in_halves)
    monkeypatch.setattr(layers_paged, "qkv_write", noted)
    found = written()
    assert seen == [(2, BATCH, WIDTH, 2 * 2 * 64)]
    assert float(abs(wanted.keys[1]).max()) > 0.1
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
