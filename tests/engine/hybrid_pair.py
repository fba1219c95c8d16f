"""A small Qwen3.5 with random weights, and a DFlash drafter for it."""

import dataclasses
import functools

import jax.numpy as jnp

from jaxspec.engine.engine import Engine
from jaxspec.engine.setup.opened import Opened
from jaxspec.layers.decoder import BlockMask, Decoder
from jaxspec.layers.gated_delta import DeltaSizes
from jaxspec.layers.rope import Rope
from jaxspec.measure.engines import random_models
from jaxspec.models.config import DFlashConfig, Qwen35Config

VOCAB = 60
TARGET = Qwen35Config(
    decoder=Decoder(32, 64, 3, 4, 2, 16, 1e-6, Rope(1e7, rotated=4), 512, wide_norms=True),
    delta=DeltaSizes(key_heads=2, value_heads=4, key_dim=8, value_dim=16, taps=4),
    layer_kinds=("delta", "delta", "attention"),
    vocab_size=VOCAB,
    tie_word_embeddings=False,
)
DRAFTER = DFlashConfig(
    decoder=Decoder(32, 64, 1, 4, 2, 8, 1e-6, Rope(1e6), 512),
    block_size=5,
    mask_token_id=VOCAB - 1,
    target_layer_ids=(1, 2),
    vocab_size=VOCAB,
    block_masks=(BlockMask(causal=False),),
)
SIZES = {
    "max_batch": 3,
    "max_model_len": 128,
    "page_size": 16,
    "prefill_chunk": 32,
    "batch_sizes": (3,),
    "prefill_shapes": ((3, 32),),
}
"""Options for all tests, so that they share compiled programs."""


@functools.cache
def opened() -> Opened:
    return random_models(TARGET, DRAFTER, jnp.float32)


def hybrid_engine(method: str = "dflash", row_by_row: bool = True, **options) -> Engine:
    """An engine for the pair. Without `row_by_row` and `exact`, blocks are read in matrix
    products."""
    pair = opened()
    target = pair.models.target.clone(row_by_row=row_by_row)
    models = dataclasses.replace(pair.models, target=target)
    return Engine.from_models(models, pair.params, method=method, **{**SIZES, **options})
