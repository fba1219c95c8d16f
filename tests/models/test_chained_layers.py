"""From one attention to the next in one op, and slots that fill its rows up: the same numbers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.block import block_after
from jaxspec.cache.keys_values import KeysValues
from jaxspec.layers import fp8, linear, stack
from jaxspec.layers.decoder import Decoder
from jaxspec.layers.fp8 import Fp8
from jaxspec.layers.gated_delta import DeltaSizes
from jaxspec.layers.rope import Rope
from jaxspec.models.config import Qwen3Config, Qwen35Config, TargetConfig
from jaxspec.models.parameters import random_params
from jaxspec.models.targets import target_of
from pallas_kernels import dense_chain
from pallas_kernels.dense_chain import chain
from pallas_kernels.dense_chain.chain import batch_in_eights
from pallas_kernels.dispatch import Choice
from pallas_kernels.fp8_product import RoundedRows, fp8_product_in_parts
from pallas_kernels.paged_attention.api import filled_attention

CONFIG = Qwen3Config(Decoder(32, 48, 3, 4, 2, 16, 1e-6, Rope(1e4), 512), 100, True, (0,))
PAGE_SIZE = 16


DELTA = DeltaSizes(key_heads=2, value_heads=4, key_dim=8, value_dim=16, taps=4)
"""Its values are as wide as what attention gives."""
HYBRID = Qwen35Config(
    dataclasses.replace(CONFIG.decoder, rope=Rope(1e4, rotated=4), wide_norms=True),
    DELTA,
    ("delta", "delta", "attention"),
    100,
    True,
)


def read(config: TargetConfig, slots: int, width: int):
    model = target_of(config, (0, 2)).clone(implementation="xla")
    params = random_params(model, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (slots, width), 0, 100)
    table = 1 + jnp.arange(slots * 4).reshape(slots, 4)
    cache = model.new_cache(slots, slots * 4 + 1, PAGE_SIZE)
    lengths = jnp.zeros((slots,), jnp.int32)
    for step in range(2):
        counts = jnp.full((slots,), width)
        block = block_after(jnp.arange(slots), lengths, counts, table, width, PAGE_SIZE)
        found = model.apply({"params": params}, tokens + step, block, cache)
        cache, lengths = found[2].commit(block), lengths + width
    hidden, features, _ = found
    kept = [layer.keys[1:] if layer_is_paged(layer) else layer for layer in cache.layers]
    return hidden, features, kept


def layer_is_paged(layer) -> bool:
    return isinstance(layer, KeysValues)


@pytest.mark.parametrize(
    ("config", "slots", "width"),
    [(CONFIG, 3, 1), (HYBRID, 2, 17), (CONFIG, 2, 16), (HYBRID, 8, 3)],
    ids=["Qwen3-3-1", "hybrid-2-17", "Qwen3-2-16", "hybrid-8-3"],
)
def test_the_same_numbers(config, slots, width, monkeypatch):
    wanted = read(config, slots, width)
    seen = []

    def in_one_kernel(attended, *others, **options):
        seen.append(attended.shape[0])
        return dense_chain(attended, *others, **options)

    def attend(query, *others, **options):
        """As the kernel, which leaves whatever was there in requests that fill the batch up."""
        return filled_attention(query, *others, **options).at[query.shape[0] :].set(jnp.nan)

    def chosen(shape, *_):
        return Choice("mosaic" if shape.tokens % 8 == 0 else "xla")

    monkeypatch.setattr(stack, "kernels_meant", lambda implementation: "mosaic")
    monkeypatch.setattr(chain, "chain_choice", chosen)
    monkeypatch.setattr(chain, "dense_chain", in_one_kernel)
    monkeypatch.setattr(chain, "filled_attention", attend)
    found = read(config, slots, width)
    assert found[0].shape == (slots, width, 32)
    in_eights = batch_in_eights(slots, width) * width
    assert in_eights % 8 == 0
    assert seen[-2 * CONFIG.decoder.num_layers :] == [in_eights] * 2 * CONFIG.decoder.num_layers
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("config", "slots", "width"),
    [(CONFIG, 2, 17), (HYBRID, 3, 1)],
    ids=["Qwen3-2-17", "hybrid-3-1"],
)
def test_the_same_numbers_in_parts(config, slots, width, monkeypatch):
    """Without the one kernel: products in parts, which the next kernel adds up."""
    wanted = read(config, slots, width)
    calls = []

    def in_pieces(x, matrix, *, implementation):
        calls.append(matrix.shape)
        parts = jnp.split(x, 2, axis=-1), jnp.split(matrix, 2)
        return jnp.stack([piece @ rows for piece, rows in zip(*parts)])

    monkeypatch.setattr(stack, "kernels_meant", lambda implementation: "mosaic")
    monkeypatch.setattr(linear, "split_product", in_pieces)
    found = read(config, slots, width)
    assert len(calls) >= 2 * 3 * CONFIG.decoder.num_layers
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("blocks", "attention_rounds"), [(True, False), (False, False), (True, True)]
)
def test_the_same_bits_with_activations_that_are_rounded_where_they_are_made(
    blocks, attention_rounds, monkeypatch
):
    """A rounding error more would be a whole step of 8 bits further on."""
    decoder = dataclasses.replace(
        CONFIG.decoder,
        hidden_size=256,
        intermediate_size=384,
        head_dim=64,
        fp8=Fp8(blocks, quantised_inputs=True),
    )
    config = dataclasses.replace(CONFIG, decoder=decoder)
    wanted = read(config, 2, 9)
    seen = []

    def product(x, *matrix, **options):
        seen.append(isinstance(x, RoundedRows))
        return fp8_product_in_parts(x, *matrix, **options)

    monkeypatch.setattr(stack, "kernels_meant", lambda implementation: "mosaic")
    monkeypatch.setattr(fp8, "fp8_product_in_parts", product)
    monkeypatch.setattr(chain, "rounds_itself", lambda *_: attention_rounds)
    found = read(config, 2, 9)
    out = attention_rounds
    first, of_layer, last = [False], [out, True, True, True], [out, True, True]
    of_read = [*first, *(config.decoder.num_layers - 1) * of_layer, *last]
    assert seen[-2 * len(of_read) :] == 2 * of_read
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, other)
