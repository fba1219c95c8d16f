"""Geometries of published models, for benchmarks with random weights."""

from jaxspec.errors import UsageError
from jaxspec.layers.decoder import BlockMask, Decoder
from jaxspec.layers.rope import Rope
from jaxspec.models.config import DFlashConfig, Qwen3Config

VOCABULARY = 151936
MASK_TOKEN = 151669

# layers, hidden, intermediate, heads, kv heads, tied
_QWEN3 = {
    "qwen3-0.6b": (28, 1024, 3072, 16, 8, True),
    "qwen3-1.7b": (28, 2048, 6144, 16, 8, True),
    "qwen3-4b": (36, 2560, 9728, 32, 8, True),
    "qwen3-8b": (36, 4096, 12288, 32, 8, False),
    "qwen3-14b": (40, 5120, 17408, 40, 8, False),
    "qwen3-32b": (64, 5120, 25600, 64, 8, False),
    "tiny": (5, 64, 128, 4, 2, True),
}
NAMES = tuple(_QWEN3)


def qwen3(name: str) -> Qwen3Config:
    """A published Qwen3 by name, for example `qwen3-8b`."""
    if name not in _QWEN3:
        raise UsageError(f"no model shape {name!r}; expected one of {', '.join(NAMES)}")
    layers, hidden, intermediate, heads, kv_heads, tied = _QWEN3[name]
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
