"""The calls that bench_kernels times: their sizes, the bytes they have to move and what they
compute."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from pallas_kernels.dense_chain import ChainShape

GEOMETRIES = {
    "32B": (8192, 5120, 25600, 10240),
    "14B": (5120, 5120, 17408, 7168),
    "8B": (4096, 4096, 12288, 6144),
    "4B": (4096, 2560, 9728, 6144),
    "1.7B": (2048, 2048, 6144, 4096),
    "0.6B": (2048, 1024, 3072, 4096),
    "3.5-9B": (4096, 4096, 12288, 12352),
    "3.5-4B": (4096, 2560, 9216, 12352),
    "tiny": (128, 128, 256, 128),
}
"""Sizes of Qwen3 models: attention's outputs per token, the hidden size, the MLP's inner size, and
the next layer's q|k|v. For Qwen3.5 the last one is the projection of a recurrent layer."""
HYBRID = ("3.5-9B", "3.5-4B")
"""The models whose norm scales are in float32."""


def name_of(model: str) -> str:
    return f"Qwen{model}" if model in HYBRID else f"Qwen3-{model}"


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
        heads = "" if self.head_dim == 128 else f", {self.heads}/{self.kv_heads} x {self.head_dim}"
        return f"{self.slots}x{self.context} q{self.width} {mask}{heads} page {self.page_size}"

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
        wide = "" if self.head_dim == 128 else f" x {self.head_dim}"
        return f"{self.slots}x{self.width} tokens, {self.heads}/{self.kv_heads} heads{wide}"

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
class NormCase:
    """The residual sum and the norm between two products, of tokens in bf16."""

    tokens: int
    hidden: int

    op = "add_norm"

    @property
    def name(self) -> str:
        return f"{self.tokens} tokens of {self.hidden}"

    @property
    def moved_bytes(self) -> int:
        return 2 * 4 * self.tokens * self.hidden

    @property
    def operations(self) -> int:
        return 0


@dataclasses.dataclass(frozen=True)
class DeltaCase:
    op: str
    """delta_read, delta_fold or delta_prefill."""
    slots: int
    width: int
    counts: int
    """Rows of the block that are folded into the state; delta_prefill folds in all of them."""
    key_heads: int = 16
    value_heads: int = 32
    dim: int = 128
    """Size of keys and of values."""

    @property
    def name(self) -> str:
        rows = f"{self.slots}x{self.width} rows"
        kept = f", {self.counts} kept" if self.op == "delta_fold" else ""
        return f"{rows}{kept}, {self.key_heads}/{self.value_heads} heads"

    @property
    def state_bytes(self) -> int:
        return self.slots * self.value_heads * self.dim**2 * 4

    @property
    def moved_bytes(self) -> int:
        folds = self.op == "delta_fold"
        heads = (1 if folds else 2) * (self.key_heads + self.value_heads)
        rows = self.slots * (self.counts if folds else self.width)
        states = (1 if self.op == "delta_read" else 2) * self.state_bytes
        return states + rows * (2 * heads * self.dim + 8 * self.value_heads)

    @property
    def operations(self) -> int:
        each, rows = (5, self.counts) if self.op == "delta_fold" else (7, self.width)
        return each * rows * self.state_bytes // 4


@dataclasses.dataclass(frozen=True)
class MixerCase:
    """The work of a recurrent layer in a decode step, after its projection."""

    op: str
    """mixer_step or block_step read a block and fold it into the state, row by row or in matrix
    products; mixer_fold and block_fold only fold, and block_folds folds many layers at once."""
    slots: int
    counts: int
    """Rows that are folded into the state."""
    width: int = 16
    key_heads: int = 16
    value_heads: int = 32
    dim: int = 128

    @property
    def name(self) -> str:
        rows = f"{self.slots}x{self.width} rows, {self.counts} kept"
        return f"{rows}, {self.key_heads}/{self.value_heads} heads"

    @property
    def moved_bytes(self) -> int:
        """Bytes of the states, and of what is read and written for each row."""
        reads, in_blocks = self.op.endswith("_step"), self.op.startswith("block")
        keys, values = self.key_heads * self.dim, self.value_heads * self.dim
        projected, left = 2 * (2 * keys + values), 2 * keys + 4 * values
        read = self.width * (projected + 2 * values + left * in_blocks) * reads
        folded = self.counts * (left if in_blocks else projected)
        states = 4 * self.value_heads * self.dim**2 * (3 if reads else 2)
        return self.slots * (states + read + folded)

    @property
    def operations(self) -> int:
        """Operations of the row by row form."""
        reads = 7 * self.width if self.op.endswith("_step") else 0
        return (reads + 5 * self.counts) * self.slots * self.value_heads * self.dim**2


@dataclasses.dataclass(frozen=True)
class ChainCase:
    model: str
    """A name of `GEOMETRIES`."""
    tokens: int
    fp8: bool = False
    """Whether the matrices are in 8 bits, with a scale for each block."""
    reads: bool = True
    """Whether the next layer's inputs are computed too."""
    quantise_inputs: bool = False
    """Whether activations are rounded to 8 bits, too."""

    op = "dense_chain"

    @property
    def name(self) -> str:
        model = f"{name_of(self.model)}{'-FP8' if self.fp8 else ''}"
        rounded = " in 8 bits" if self.quantise_inputs else ""
        last = "" if self.reads else ", no next inputs"
        return f"{model}, {self.tokens} tokens{rounded}{last}"

    @property
    def shape(self) -> ChainShape:
        attended, hidden, inner, qkv = GEOMETRIES[self.model]
        return ChainShape(
            self.tokens,
            attended,
            hidden,
            inner,
            qkv if self.reads else 0,
            norm_dtype="float32" if self.model in HYBRID else None,
        )

    @property
    def weights(self) -> int:
        s = self.shape
        return (s.attended + 3 * s.inner + s.qkv) * s.hidden

    @property
    def moved_bytes(self) -> int:
        s = self.shape
        of_weights = self.weights + 4 * self.weights // 128**2 if self.fp8 else 2 * self.weights
        return of_weights + 2 * self.tokens * (s.attended + 2 * s.hidden + s.qkv)

    @property
    def operations(self) -> int:
        return 2 * self.tokens * self.weights


@dataclasses.dataclass(frozen=True)
class ProductCase:
    """A product with an 8-bit matrix that has a scale for each block."""

    model: str
    """A name of `GEOMETRIES`."""
    matrix: Literal["out", "gate_up", "down", "qkv"]
    tokens: int
    quantise_inputs: bool = False

    op = "fp8_product"

    @property
    def name(self) -> str:
        rounded = " in 8 bits" if self.quantise_inputs else ""
        return f"{name_of(self.model)} {self.matrix}, {self.tokens} tokens{rounded}"

    @property
    def sides(self) -> tuple[int, int]:
        """The numbers of inputs and of outputs."""
        attended, hidden, inner, qkv = GEOMETRIES[self.model]
        return {
            "out": (attended, hidden),
            "gate_up": (hidden, 2 * inner),
            "down": (inner, hidden),
            "qkv": (hidden, qkv),
        }[self.matrix]

    @property
    def moved_bytes(self) -> int:
        inputs, outputs = self.sides
        scales = 4 * inputs * outputs // 128**2
        return inputs * outputs + scales + 2 * self.tokens * (inputs + outputs)

    @property
    def operations(self) -> int:
        inputs, outputs = self.sides
        return 2 * self.tokens * inputs * outputs


Case = AttentionCase | WriteCase | NormCase | ChainCase | DeltaCase | MixerCase | ProductCase


@dataclasses.dataclass(frozen=True)
class Cases:
    """The cases that are timed in one run."""

    contexts: Sequence[tuple[int, int]]
    """Slots and contexts for the sweep over sizes."""
    attention: Sequence[AttentionCase]
    writes: Sequence[WriteCase]
    norms: Sequence[NormCase]
    chains: Sequence[ChainCase]
    deltas: Sequence[DeltaCase]
    mixers: Sequence[MixerCase]
    products: Sequence[ProductCase]


MATRICES = ("out", "gate_up", "down", "qkv")
CONTEXTS = ((1, 1024), (1, 4096), (8, 1024), (8, 4096), (32, 1024), (32, 4096))
CASES = {
    "h100": Cases(
        CONTEXTS,
        [
            AttentionCase(slots, context, width, causal)
            for slots, context in CONTEXTS
            for width, causal in ((1, True), (16, True), (16, False))
        ]
        + [AttentionCase(8, 2048, 512, True)]
        + [
            AttentionCase(slots, 1024, width, True, heads=heads, kv_heads=4, head_dim=256)
            for heads in (16, 24)
            for slots, width in ((1, 1), (1, 16), (8, 16), (32, 16), (1, 512))
        ],
        [WriteCase(1, 1), WriteCase(1, 16), WriteCase(8, 16), WriteCase(32, 16)]
        + [WriteCase(8, 16, heads, 4, 256) for heads in (16, 24)],
        [NormCase(tokens, 4096) for tokens in (1, 16, 128, 512)],
        [
            ChainCase(model, tokens, fp8)
            for fp8 in (False, True)
            for model in ("8B", "4B", "1.7B", "0.6B")
            for tokens in (8, 16, 32, 64)
        ]
        + [
            ChainCase(model, tokens, fp8=True, quantise_inputs=True)
            for model in ("8B", "4B")
            for tokens in (8, 16, 32, 64)
        ]
        + [ChainCase("8B", tokens, fp8=True, quantise_inputs=True) for tokens in (96, 128)]
        + [
            ChainCase(model, tokens, reads=reads)
            for reads in (True, False)
            for model in HYBRID
            for tokens in (8, 16, 32, 64)
        ],
        [
            DeltaCase(op, slots, 16, counts, value_heads=heads)
            for heads in (32, 48)
            for slots in (1, 8, 32)
            for op, counts in (("delta_read", 0), ("delta_fold", 5), ("delta_fold", 16))
        ]
        + [DeltaCase("delta_read", 8, 1, 0), DeltaCase("delta_fold", 8, 1, 1)]
        + [
            DeltaCase("delta_prefill", slots, 512, 512, value_heads=heads)
            for heads in (32, 48)
            for slots in (1, 8)
        ],
        [
            MixerCase(op, slots, counts)
            for slots in (1, 8, 32)
            for op, counts in (
                ("mixer_step", 5),
                ("block_step", 5),
                ("mixer_fold", 5),
                ("block_fold", 5),
                ("block_fold", 16),
                ("block_folds", 5),
            )
        ],
        [
            ProductCase(model, matrix, tokens)
            for model in ("8B", "4B")
            for tokens in (1, 16, 64, 128, 256, 512)
            for matrix in MATRICES
        ]
        + [
            ProductCase("8B", matrix, tokens, quantise_inputs=True)
            for tokens in (16, 64, 128, 256, 512, 2048)
            for matrix in MATRICES
        ],
    ),
    # For the reference on a CPU, to check that the script works.
    "tiny": Cases(
        ((1, 64),),
        [AttentionCase(1, 64, 4, True, heads=4, kv_heads=2, head_dim=16)],
        [WriteCase(1, 4, heads=4, kv_heads=2, head_dim=16)],
        [NormCase(4, 128)],
        [
            ChainCase("tiny", 8),
            ChainCase("tiny", 8, fp8=True),
            ChainCase("tiny", 8, fp8=True, quantise_inputs=True),
            ChainCase("tiny", 8, reads=False),
        ],
        [DeltaCase(op, 2, 4, 3, 1, 2, 8) for op in ("delta_read", "delta_fold", "delta_prefill")],
        [
            MixerCase(op, 2, 3, 4, 1, 2, 8)
            for op in ("mixer_step", "block_step", "mixer_fold", "block_fold", "block_folds")
        ],
        [ProductCase("tiny", "gate_up", 8, quantised) for quantised in (False, True)],
    ),
}
