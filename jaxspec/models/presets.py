"""Geometries of published models, for benchmarks with random weights."""

from jaxspec.errors import UsageError
from jaxspec.layers.decoder import BlockMask, Decoder
from jaxspec.layers.rope import Rope
from jaxspec.models.config import DFlashConfig, Qwen3Config
from jaxspec.models.shapes import NAMES, QWEN3

VOCABULARY = 151936
MASK_TOKEN = 151669


def qwen3(name: str) -> Qwen3Config:
    """A published Qwen3 by name, for example `qwen3-8b`."""
    if name not in QWEN3:
        raise UsageError(f"no model shape {name!r}; expected one of {', '.join(NAMES)}")
    layers, hidden, intermediate, heads, kv_heads, tied = QWEN3[name]
    return Qwen3Config(_decoder(layers, hidden, intermediate, heads, kv_heads), VOCABULARY, tied)


def dflash_for(target: Qwen3Config, block_size: int = 16, num_layers: int = 5) -> DFlashConfig:
    """A drafter with the proportions of the published ones: five layers, five features."""
    d = target.decoder
    last, first = d.num_layers - 3, 1
    features = tuple(round(first + i * (last - first) / 4) for i in range(5))
    return DFlashConfig(
        decoder=_decoder(
            num_layers, d.hidden_size, d.intermediate_size, d.num_heads, d.num_kv_heads
        ),
        block_size=block_size,
        mask_token_id=MASK_TOKEN,
        target_layer_ids=features,
        vocab_size=target.vocab_size,
        block_masks=(BlockMask(causal=False),) * num_layers,
        num_target_layers=d.num_layers,
    )


def _decoder(layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int) -> Decoder:
    return Decoder(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope=Rope(1e6),
        max_position_embeddings=40960,
    )
