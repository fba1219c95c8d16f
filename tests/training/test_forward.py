"""The packed training forward computes what decoding computes, block by block."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.block import block_after
from jaxspec.layers.convolution import Convolutions
from jaxspec.layers.decoder import BlockMask, Decoder
from jaxspec.layers.rope import Rope
from jaxspec.models.config import DFlashConfig, Qwen3Config
from jaxspec.models.dflash import DFlash
from jaxspec.models.parameters import random_params
from jaxspec.models.qwen3 import Qwen3
from jaxspec.models.whole_sequences import block_hidden, causal_hidden

PAGE, LENGTH, WIDTH, MASK_TOKEN = 4, 24, 5, 49
ANCHORS = jnp.array([[1, 7, 19], [3, 4, 12]], jnp.int32)


def decoder(num_layers: int) -> Decoder:
    return Decoder(32, 48, num_layers, 4, 2, 16, 1e-6, Rope(1e4), 512)


def models(
    masks: tuple[BlockMask, ...], convolutions: Convolutions | None = None
) -> tuple[Qwen3, DFlash]:
    target = Qwen3(Qwen3Config(decoder(3), 50, True), (0, 2))
    config = DFlashConfig(
        decoder(len(masks)), WIDTH, MASK_TOKEN, (0, 2), 50, masks, convolutions=convolutions
    )
    return target, DFlash(config)


def lively(params, seed):
    """Norm scales away from one, so that a missing norm is noticed."""
    key = jax.random.key(seed)
    return jax.tree.map(
        lambda x: x * jax.random.uniform(key, x.shape, minval=0.5, maxval=1.5), params
    )


def page_table(batch: int) -> jax.Array:
    pages = -(-(LENGTH + WIDTH) // PAGE)
    return 1 + jnp.arange(batch * pages, dtype=jnp.int32).reshape(batch, pages)


def causal(target):
    return jax.jit(lambda p, tokens: target.apply({"params": p}, tokens, method=causal_hidden))


def decode_block(target, drafter, target_params, params, tokens, features, anchors):
    """One block per sequence, computed as the engine does when it drafts."""
    batch = len(tokens)
    table = page_table(batch)
    cache = drafter.new_cache(batch, table.size + 1, PAGE)
    zero, slots = jnp.zeros(batch, jnp.int32), jnp.arange(batch)
    before = block_after(slots, zero, anchors, table, width=LENGTH, page_size=PAGE)
    cache = drafter.apply({"params": params}, features, before, cache, method="write_context")
    inputs = jnp.full((batch, WIDTH), MASK_TOKEN).at[:, 0].set(tokens[jnp.arange(batch), anchors])
    embedded = target.apply({"params": target_params}, inputs, method="embed")
    block = block_after(slots, anchors, zero + WIDTH, table, width=WIDTH, page_size=PAGE)
    hidden, _ = drafter.apply({"params": params}, embedded, block, cache)
    return target.apply({"params": target_params}, hidden, method="logits")


@pytest.mark.parametrize(
    "masks",
    [
        (BlockMask(False),) * 2,
        (BlockMask(True, 6), BlockMask(False)),
        (BlockMask(False, 3),) * 2,
        (BlockMask(False, 3, window_of_block=True), BlockMask(True, 6, window_of_block=True)),
    ],
    ids=["full", "causal window, then full", "window inside the block", "windows of the block"],
)
@pytest.mark.parametrize("convolutions", [None, Convolutions(2, 16)], ids=["", "convolutions"])
def test_blocks_equal_decoding(masks, convolutions):
    target, drafter = models(masks, convolutions)
    target_params = lively(random_params(target, jax.random.key(0)), 1)
    params = lively(random_params(drafter, jax.random.key(2)), 3)
    tokens = jax.random.randint(jax.random.key(4), (2, LENGTH), 0, 49)
    _, features = causal(target)(target_params, tokens)

    inputs = jnp.full((*ANCHORS.shape, WIDTH), MASK_TOKEN)
    inputs = inputs.at[:, :, 0].set(jnp.take_along_axis(tokens, ANCHORS, axis=1))
    embedded = target.apply({"params": target_params}, inputs.reshape(2, -1), method="embed")
    blocks = jax.jit(lambda *inputs: drafter.apply(*inputs, method=block_hidden))
    hidden = blocks({"params": params}, embedded, features, ANCHORS)
    packed = target.bind({"params": target_params}).logits(hidden)
    packed = packed.reshape(2, ANCHORS.shape[1], WIDTH, -1)

    decode = jax.jit(partial(decode_block, target, drafter))
    for i in range(ANCHORS.shape[1]):
        decoded = decode(target_params, params, tokens, features, ANCHORS[:, i])
        np.testing.assert_allclose(packed[:, i], decoded, atol=1e-5, rtol=0)


def test_target_equals_decoding():
    target, _ = models((BlockMask(False),))
    params = lively(random_params(target, jax.random.key(0)), 1)
    tokens = jax.random.randint(jax.random.key(4), (2, LENGTH), 0, 49)
    hidden, features = causal(target)(params, tokens)

    table, zero, slots = page_table(2), jnp.zeros(2, jnp.int32), jnp.arange(2)
    cache = target.new_cache(2, table.size + 1, PAGE)
    block = block_after(slots, zero, zero + LENGTH, table, width=LENGTH, page_size=PAGE)
    decoded_hidden, decoded_features, _ = jax.jit(target.apply)(
        {"params": params}, tokens, block, cache
    )
    np.testing.assert_allclose(hidden, decoded_hidden, atol=1e-5, rtol=0)
    np.testing.assert_allclose(features, decoded_features, atol=1e-5, rtol=0)
