"""The calls that bench_kernels times: their sizes, the bytes they have to move and what they
compute."""

import dataclasses
from collections.abc import Sequence

from pallas_kernels.dense_chain import ChainShape

GEOMETRIES = {
    "8B": (4096, 4096, 12288, 6144),
    "4B": (4096, 2560, 9728, 6144),
    "1.7B": (2048, 2048, 6144, 4096),
    "0.6B": (2048, 1024, 3072, 4096),
    "tiny": (64, 64, 128, 128),
}
"""Sizes of Qwen3 models: what attention gives per token, hidden, inner, the next layer's q|k|v."""


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    slots: int
    context: int
    width: int
    causal: bool
    page_size: int = 16
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    op = "paged_attention"

    @property
    def name(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"{self.slots}x{self.context} q{self.width} {mask} page {self.page_size}"

    @property
    def cache_bytes(self) -> int:
        return self.slots * self.context * self.kv_heads * self.head_dim * 2 * 2

    @property
    def moved_bytes(self) -> int:
        return self.cache_bytes + 2 * self.slots * self.width * self.heads * self.head_dim * 2

    @property
    def operations(self) -> int:
        first = self.context - self.width
        seen = sum(first + i + 1 if self.causal else self.context for i in range(self.width))
        return 4 * self.slots * self.heads * self.head_dim * seen


@dataclasses.dataclass(frozen=True)
class WriteCase:
    slots: int
    width: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16

    op = "qkv_write"

    @property
    def name(self) -> str:
        return f"{self.slots}x{self.width} tokens, {self.heads}/{self.kv_heads} heads"

    @property
    def fused(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def moved_bytes(self) -> int:
        return self.slots * self.width * (2 * self.fused * 2 + self.head_dim * 4)

    @property
    def operations(self) -> int:
        return 0


@dataclasses.dataclass(frozen=True)
class ChainCase:
    model: str
    """A name of `GEOMETRIES`."""
    tokens: int

    op = "dense_chain"

    @property
    def name(self) -> str:
        return f"Qwen3-{self.model}, {self.tokens} tokens"

    @property
    def shape(self) -> ChainShape:
        return ChainShape(self.tokens, *GEOMETRIES[self.model])

    @property
    def weights(self) -> int:
        s = self.shape
        return (s.attended + 3 * s.inner + s.qkv) * s.hidden

    @property
    def moved_bytes(self) -> int:
        s = self.shape
        return 2 * (self.weights + self.tokens * (s.attended + 2 * s.hidden + s.qkv))

    @property
    def operations(self) -> int:
        return 2 * self.tokens * self.weights


Case = AttentionCase | WriteCase | ChainCase


@dataclasses.dataclass(frozen=True)
class Cases:
    """What is timed in one run."""

    contexts: Sequence[tuple[int, int]]
    """Slots and context of the sweep over sizes."""
    attention: Sequence[AttentionCase]
    writes: Sequence[WriteCase]
    chains: Sequence[ChainCase]


CONTEXTS = ((1, 1024), (1, 4096), (8, 1024), (8, 4096), (32, 1024), (32, 4096))
CASES = {
    "h100": Cases(
        CONTEXTS,
        [
            AttentionCase(slots, context, width, causal)
            for slots, context in CONTEXTS
            for width, causal in ((1, True), (16, True), (16, False))
        ]
        + [AttentionCase(8, 2048, 512, True)],
        [WriteCase(1, 1), WriteCase(1, 16), WriteCase(8, 16), WriteCase(32, 16)],
        [
            ChainCase(model, tokens)
            for model in ("8B", "4B", "1.7B", "0.6B")
            for tokens in (8, 16, 32, 64)
        ],
    ),
    # For the reference on a CPU, to see that the script works.
    "tiny": Cases(
        ((1, 64),),
        [AttentionCase(1, 64, 4, True, heads=4, kv_heads=2, head_dim=16)],
        [WriteCase(1, 4, heads=4, kv_heads=2, head_dim=16)],
        [ChainCase("tiny", 8)],
    ),
}
