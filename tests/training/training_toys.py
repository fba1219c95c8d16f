"""Tiny models and data that train in seconds on a CPU."""

import jax
import numpy as np

from jaxspec.layers.decoder import BlockMask, Decoder
from jaxspec.layers.rope import Rope
from jaxspec.models.config import DFlashConfig, Qwen3Config
from jaxspec.models.dflash import DFlash
from jaxspec.models.parameters import random_params
from jaxspec.models.qwen3 import Qwen3
from jaxspec.training.data import Sequences
from jaxspec.training.objective import DrafterObjective, split_frozen
from jaxspec.training.recipe import Recipe

VOCAB, BLOCK, MASK_TOKEN = 23, 4, 22
TWO_SLOTS = {
    "max_batch": 2,
    "max_model_len": 24,
    "page_size": 8,
    "driver": "overlapped",
    "batch_sizes": (2,),
    "prefill_chunk": 8,
    "prefill_shapes": ((2, 8),),
}
"""Options of an engine with few programs."""


def decoder(num_layers: int, hidden: int = 32) -> Decoder:
    return Decoder(hidden, 2 * hidden, num_layers, 2, 1, 16, 1e-6, Rope(1e4), 512)


def toy_target() -> Qwen3:
    return Qwen3(Qwen3Config(decoder(2), VOCAB, True), (0, 1))


def toy_drafter(draft_vocab: int | None = None) -> DFlash:
    owns = draft_vocab is not None
    masks = (BlockMask(False),) * 2
    config = DFlashConfig(
        decoder(2), BLOCK, MASK_TOKEN, (0, 1), VOCAB, masks, draft_vocab, False, owns
    )
    return DFlash(config)


def toy_objective(recipe: Recipe, drafter: DFlash | None = None) -> DrafterObjective:
    return DrafterObjective(toy_target(), drafter or toy_drafter(), recipe, np.float32)


def toy_params(objective: DrafterObjective):
    """Trainable and frozen parameters."""
    target = random_params(objective.target, jax.random.key(0))
    learns, stays = split_frozen(random_params(objective.drafter, jax.random.key(1)))
    return learns, {"target": target, "drafter": stays}


def counting_sequences(count: int = 16, length: int = 24) -> Sequences:
    """Sequences that count up by one or by two, around the vocabulary."""
    starts, strides = np.arange(count)[:, None], 1 + np.arange(count)[:, None] % 2
    tokens = (starts + strides * np.arange(length)) % (VOCAB - 1)
    return Sequences(tokens.astype(np.int32), np.zeros(count, np.int32))
