"""Geometries of published models, for benchmarks with random weights."""

import dataclasses

from jaxspec.errors import UsageError
from jaxspec.layers.convolution import Convolutions
from jaxspec.layers.decoder import BlockMask, Decoder
from jaxspec.layers.fp8 import Fp8
from jaxspec.layers.gated_delta import DeltaSizes
from jaxspec.layers.rope import Rope
from jaxspec.models.config import (
    ConfidenceHead,
    DFlashConfig,
    DrafterConfig,
    MarkovHead,
    Qwen3Config,
    Qwen35Config,
    Selector,
    TargetConfig,
)
from jaxspec.models.eagle3_config import Eagle3Config, default_layer_ids
from jaxspec.models.shapes import FP8, NAMES, QWEN3, QWEN35

VOCABULARY, QWEN35_VOCABULARY = 151936, 248320
MASK_TOKEN, QWEN35_MASK_TOKEN = 151669, 248070
EAGLE3_VOCABULARY = 32000


def published(name: str) -> TargetConfig:
    """A published target by name, for example `qwen3-8b` or `qwen3.5-4b`."""
    if name not in NAMES:
        raise UsageError(f"no model shape {name!r}; expected one of {', '.join(NAMES)}")
    return qwen35(name) if name in QWEN35 else qwen3(name)


def qwen35(name: str) -> Qwen35Config:
    """A published dense Qwen3.5 by name."""
    *sizes, tied, key_heads, value_heads, delta_dim = QWEN35[name]
    decoder = dataclasses.replace(
        _decoder(*sizes),
        rope=Rope(1e7, rotated=sizes[-1] // 4),
        max_position_embeddings=262144,
        wide_norms=True,
    )
    return Qwen35Config(
        decoder=decoder,
        delta=DeltaSizes(key_heads, value_heads, delta_dim, delta_dim, taps=4),
        layer_kinds=("delta", "delta", "delta", "attention") * (sizes[0] // 4),
        vocab_size=QWEN35_VOCABULARY,
        tie_word_embeddings=tied,
    )


def qwen3(name: str) -> Qwen3Config:
    """A published Qwen3 by name, for example `qwen3-8b`."""
    layers, hidden, intermediate, heads, kv_heads, tied = QWEN3[FP8.get(name, name)]
    decoder = _decoder(layers, hidden, intermediate, heads, kv_heads)
    if name in FP8:
        decoder = dataclasses.replace(decoder, fp8=Fp8(blocks=True))
    return Qwen3Config(decoder, VOCABULARY, tied)


def drafter_for(kind: str, target: TargetConfig, block_size: int | None = None) -> DrafterConfig:
    """A drafter of one of the kinds in `DRAFTERS`, by default with the published block size."""
    make = {
        "dflash": dflash_for,
        "dflash2": dflash2_for,
        "dspark": dspark_for,
        "eagle3": eagle3_for,
    }[kind]
    return make(target) if block_size is None else make(target, block_size)


def dflash_for(target: TargetConfig, block_size: int = 16, num_layers: int = 5) -> DFlashConfig:
    """A drafter with the proportions of the published ones: five layers, five features."""
    d = target.decoder
    last, first = d.num_layers - 3, 1
    features = tuple(round(first + i * (last - first) / 4) for i in range(5))
    return DFlashConfig(
        decoder=_decoder(num_layers, d.hidden_size, d.intermediate_size, *_drafter_heads(target)),
        block_size=block_size,
        mask_token_id=MASK_TOKEN if isinstance(target, Qwen3Config) else QWEN35_MASK_TOKEN,
        target_layer_ids=features,
        vocab_size=target.vocab_size,
        block_masks=(BlockMask(causal=False),) * num_layers,
        num_target_layers=d.num_layers,
    )


def dflash2_for(target: TargetConfig, block_size: int = 16) -> DFlashConfig:
    """A drafter with the proportions of the published DFlash2 drafters: those of DFlash, with
    convolutions of two taps and a selector of rank 256 among 16 candidates."""
    return dataclasses.replace(
        dflash_for(target, block_size),
        convolutions=Convolutions(taps=2, group_size=16),
        transition=Selector(rank=256, candidates=16),
    )


def dspark_for(target: TargetConfig, block_size: int = 8, num_layers: int = 5) -> DFlashConfig:
    """A drafter with the proportions of DeepSpec's: seven rows that all draft, its own embedding
    and head, a Markov head of rank 256 and a confidence head."""
    return dataclasses.replace(
        dflash_for(target, block_size, num_layers),
        owns_embedding=True,
        owns_head=True,
        anchor_first=True,
        transition=MarkovHead("vanilla", rank=256, candidates=16),
        confidence=ConfidenceHead(reads_token=True),
    )


def eagle3_for(target: TargetConfig, block_size: int = 4) -> Eagle3Config:
    """A drafter with the proportions of the published ones: one layer whose heads are not normed,
    three features, a reduced vocabulary."""
    d = target.decoder
    decoder = _decoder(1, d.hidden_size, d.intermediate_size, *_drafter_heads(target))
    return Eagle3Config(
        decoder=dataclasses.replace(decoder, head_norms=False),
        num_drafts=block_size - 1,
        target_layer_ids=default_layer_ids(d.num_layers),
        target_hidden_size=d.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=min(EAGLE3_VOCABULARY, target.vocab_size),
        owns_head=True,
        num_target_layers=d.num_layers,
    )


def _drafter_heads(target: TargetConfig) -> tuple[int, int]:
    """Heads and kv heads of a drafter, whose head_dim is 128. For a Qwen3 they are the target's.
    For a Qwen3.5 with larger heads there are more, so that all heads together have the same size,
    but not more than published drafters have."""
    heads, kv_heads = target.decoder.num_heads, target.decoder.num_kv_heads
    times = target.decoder.head_dim // 128
    return (heads, kv_heads) if times < 2 else (min(times * heads, 32), min(times * kv_heads, 8))


def _decoder(
    layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int = 128
) -> Decoder:
    return Decoder(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-6,
        rope=Rope(1e6),
        max_position_embeddings=40960,
    )
