"""The confidence head against its formula, in double precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.layers.decoder import BlockMask, Decoder
from jaxspec.layers.rope import Rope
from jaxspec.models.config import ConfidenceHead, DFlashConfig, MarkovHead
from jaxspec.models.dflash import DFlash
from jaxspec.models.parameters import random_params

HIDDEN, VOCAB, RANK, BATCH, PLACES = 32, 50, 6, 2, 5
DECODER = Decoder(HIDDEN, 64, 1, 2, 1, 16, 1e-6, Rope(1e6), 128)


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("reads_token", [True, False])
def test_chance_of_a_draft(reads_token):
    config = DFlashConfig(
        DECODER,
        PLACES + 1,
        3,
        (0,),
        VOCAB,
        (BlockMask(False),),
        anchor_first=True,
        transition=MarkovHead("vanilla", RANK),
        confidence=ConfidenceHead(reads_token),
    )
    drafter = DFlash(config, jnp.float64, "xla")
    random = np.random.default_rng(0)
    params = random_params(drafter, jax.random.key(0))
    noise = lambda x: jnp.asarray(random.normal(size=x.shape, scale=0.2))
    for part in "transition", "confidence_head":
        params[part] = jax.tree.map(noise, params[part])
    hidden = random.normal(size=(BATCH, PLACES, HIDDEN))
    previous = random.integers(0, VOCAB, (BATCH, PLACES))
    before = np.asarray(params["transition"]["preceding"]["embedding"])[previous]
    read = np.concatenate([hidden, before], axis=-1) if reads_token else hidden
    head = jax.tree.map(np.asarray, params["confidence_head"])
    expected = 1 / (1 + np.exp(-(read @ head["kernel"] + head["bias"])[..., 0]))
    found = drafter.apply(
        {"params": params},
        jnp.asarray(hidden),
        jnp.asarray(previous, jnp.int32),
        method="confidence",
    )
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert 0.01 < expected.min() < 0.5 < expected.max() < 1
