"""A chain over a whole sequence computes what decoding computes, row by row over pages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.block import block_after
from jaxspec.layers.decoder import Decoder
from jaxspec.layers.rope import Rope
from jaxspec.models.eagle3 import Eagle3
from jaxspec.models.eagle3_config import Eagle3Config
from jaxspec.models.parameters import random_params
from jaxspec.models.whole_chains import chain_hidden

PAGE, LENGTH, DRAFTS = 4, 12, 3
ANCHORS = jnp.array([[1, 6], [3, 8]], jnp.int32)


def model(head_norms: bool, norm_output: bool) -> Eagle3:
    decoder = Decoder(16, 24, 2, 2, 1, 8, 1e-6, Rope(1e4), 64, head_norms)
    return Eagle3(Eagle3Config(decoder, DRAFTS, (0, 2), 16, 50, norm_output=norm_output))


def decoded(drafter, params, embedded, fused, anchor):
    """The chains at one anchor per sequence: rows before it are written, then one row at a time."""
    count = len(embedded)
    table = 1 + jnp.arange(count * 4, dtype=jnp.int32).reshape(count, 4)
    cache, slots = drafter.new_cache(count, table.size + 1, PAGE), jnp.arange(count)

    def block(start, rows, width):
        return block_after(slots, start, rows, table, width, PAGE)

    zero, one = jnp.zeros(count, jnp.int32), jnp.ones(count, jnp.int32)
    rows = block(zero, anchor - 1, LENGTH - 1)
    cache = drafter.apply(params, embedded[:, 1:], fused[:, :-1], rows, cache, method="write_rows")
    at = lambda x, positions: x[jnp.arange(count), positions][:, None]
    hidden, found = at(fused, anchor - 1), []
    for step in range(DRAFTS):
        row = block(anchor - 1 + step, one, 1)
        final, hidden, cache = drafter.apply(
            params, at(embedded, anchor + step), hidden, row, cache
        )
        found.append(final[:, 0])
    return jnp.stack(found, axis=1)


@pytest.mark.parametrize("head_norms, norm_output", [(True, False), (False, True)])
def test_chains_equal_decoding(head_norms, norm_output):
    drafter = model(head_norms, norm_output)
    keys = jax.random.split(jax.random.key(0), 3)
    params = {"params": random_params(drafter, keys[0])}
    embedded = jax.random.normal(keys[1], (2, LENGTH, 16))
    features = jax.random.normal(keys[2], (2, LENGTH, 32))
    whole = jax.jit(lambda *inputs: drafter.apply(*inputs, method=chain_hidden))
    chains = whole(params, embedded, features, ANCHORS)
    assert chains.shape == (2, 2, DRAFTS, 16)
    fused = drafter.apply(params, features, method="fuse")
    decode = jax.jit(lambda anchor: decoded(drafter, params, embedded, fused, anchor))
    for i in range(2):
        np.testing.assert_allclose(chains[:, i], decode(ANCHORS[:, i]), atol=1e-5)
