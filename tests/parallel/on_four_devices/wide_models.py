"""Tiny pairs with heads for four devices, random weights, and requests for them."""

import dataclasses
import functools

from jaxspec.engine.engine import Engine
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.engine.setup.opened import Opened
from jaxspec.layers.decoder import Decoder
from jaxspec.layers.gated_delta import DeltaSizes
from jaxspec.layers.rope import Rope
from jaxspec.measure.engines import random_models
from jaxspec.models.config import DrafterConfig, MarkovHead, Qwen3Config, Qwen35Config
from jaxspec.models.presets import drafter_for

VOCAB, HIDDEN = 512, 64
DECODER = Decoder(
    hidden_size=HIDDEN,
    intermediate_size=96,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    head_dim=16,
    rms_norm_eps=1e-6,
    rope=Rope(1e4),
    max_position_embeddings=400,
)
TARGET = Qwen3Config(DECODER, VOCAB, tie_word_embeddings=False)
HYBRID = Qwen35Config(
    dataclasses.replace(DECODER, rope=Rope(1e4, rotated=4), wide_norms=True),
    DeltaSizes(key_heads=4, value_heads=8, key_dim=8, value_dim=16, taps=4),
    layer_kinds=("delta", "attention"),
    vocab_size=VOCAB,
    tie_word_embeddings=False,
)

PROMPTS = [[5, 9, 33, 9, 70], [8, 1, 2] * 9, [100] * 3, [4, 5, 6, 7] * 12]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
MIXED = [
    SamplingParams(max_tokens=16, ignore_eos=True),
    SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.9, top_p=0.95, seed=3),
    SamplingParams(
        max_tokens=12, ignore_eos=True, temperature=1.0, seed=5, speculate=False, logprobs=3
    ),
    SamplingParams(max_tokens=9, ignore_eos=True, logprobs=2),
]
"""Greedy, sampled, without drafts, with log probabilities; each with a budget of its own."""


@functools.cache
def wide_models(kind: str = "dflash") -> Opened:
    """A target and a drafter of this kind; "hybrid" is a Qwen3.5 with a DFlash drafter, "reduced"
    a DFlash drafter with half of the vocabulary, and "all tokens" a DSpark drafter whose walk has
    no candidates."""
    if kind == "hybrid":
        return random_models(HYBRID, _drafter("dflash"), "float32")
    return random_models(TARGET, _drafter(kind), "float32")


def _drafter(kind: str) -> DrafterConfig:
    config = drafter_for({"reduced": "dflash", "all tokens": "dspark"}.get(kind, kind), TARGET, 4)
    sizes = {"decoder": dataclasses.replace(DECODER, num_layers=1), "target_layer_ids": (0, 0)}
    if kind == "eagle3":
        sizes |= {"draft_vocab_size": VOCAB // 2, "target_hidden_size": HIDDEN}
    else:
        sizes |= {"mask_token_id": 3, "block_masks": config.block_masks[:1]}
    if kind == "reduced":
        sizes |= {"draft_vocab_size": VOCAB // 2, "owns_head": True}
    if kind == "all tokens":
        sizes |= {"transition": MarkovHead("rnn", rank=16)}
    return dataclasses.replace(config, vocab_size=VOCAB, **sizes)


def wide_engine(devices: int, kind: str = "dflash", **options) -> Engine:
    sizes = {
        "max_batch": 4,
        "max_model_len": 256,
        "page_size": 16,
        "prefill_chunk": 32,
        "batch_sizes": (4,),
        "prefill_shapes": ((4, 32),),
        "driver": "overlapped",
    }
    pair = wide_models(kind)
    options = {"tensor_parallel_size": devices, **sizes, **options}
    return Engine.from_models(pair.models, pair.params, **options)


def facts(outputs) -> list:
    return [(one.token_ids, one.stats.acceptance_lengths, one.error) for one in outputs]
