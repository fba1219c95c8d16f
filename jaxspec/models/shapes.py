"""Sizes of published models. Does not import jax: `--help` lists the names."""

# layers, hidden, intermediate, heads, kv heads, tied
QWEN3 = {
    "qwen3-0.6b": (28, 1024, 3072, 16, 8, True),
    "qwen3-1.7b": (28, 2048, 6144, 16, 8, True),
    "qwen3-4b": (36, 2560, 9728, 32, 8, True),
    "qwen3-8b": (36, 4096, 12288, 32, 8, False),
    "qwen3-14b": (40, 5120, 17408, 40, 8, False),
    "qwen3-32b": (64, 5120, 25600, 64, 8, False),
    "tiny": (5, 64, 128, 4, 2, True),
}
# layers, hidden, intermediate, heads, kv heads, head_dim, tied;
# of recurrent layers: heads of keys, heads of values, key_dim and value_dim
QWEN35 = {
    "qwen3.5-4b": (32, 2560, 9216, 16, 4, 256, True, 16, 32, 128),
    "qwen3.5-9b": (32, 4096, 12288, 16, 4, 256, False, 16, 32, 128),
    "qwen3.5-27b": (64, 5120, 17408, 24, 4, 256, False, 16, 48, 128),
    "tiny-hybrid": (4, 64, 128, 4, 2, 32, True, 2, 4, 16),
}
"""Three layers of four are recurrent."""
FP8 = {f"{name}-fp8": name for name in ("qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b")}
"""The same models with 8-bit weights in blocks of 128x128, as in their FP8 checkpoints."""
NAMES = (*QWEN3, *FP8, *QWEN35)
