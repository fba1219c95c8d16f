"""A model of Qwen3-4B's width with few layers and a small vocabulary, and a drafter for it: wide
enough for all kernels, small enough that only figures have to be recorded.

Every weight is drawn from its name, and is a number that bfloat16 represents exactly. So a float32
model and a bfloat16 model have the same weights, and their results differ by rounding only.
"""

import math
import zlib

import numpy as np

from oracles import draws

TARGET = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 10,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": 4094,
    "eos_token_id": 4095,
}
DRAFTER = TARGET | {
    "num_hidden_layers": 3,
    "block_size": 16,
    "dflash_config": {"mask_token_id": 4093, "target_layer_ids": [1, 3, 5, 6, 8]},
}
MASKS: list[tuple[bool, int | None]] = [(False, None)] * DRAFTER["num_hidden_layers"]
"""For each drafter layer: whether it is causal, and its window."""
PROMPT = 97
"""Tokens of the prompt. The drafter's block starts with the last one."""
LIKELIEST, OTHERS = 16, 32
"""For how many tokens per position log probabilities are recorded: likeliest and random ones."""


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A tensor of a checkpoint in Hugging Face layout, by its name, as float32.

    Its numbers are odd multiples of a power of two, with at most eight significant bits.
    """
    words = np.random.PCG64(zlib.crc32(name.encode())).random_raw(-(-math.prod(shape) // 8))
    drawn = words.view(np.int8)[: math.prod(shape)].reshape(shape).astype(np.float32)
    if len(shape) == 1:  # a norm's scale, between 0.6 and 1.4
        return 1 + np.sign(drawn + 0.5) * np.round(8 + np.abs(drawn) / 3) / 128
    return (drawn * 2 + 1) * 2.0 ** -(8 + spread_bits(name, shape))


def spread_bits(name: str, shape: tuple[int, ...]) -> int:
    """How often the numbers, which are between -1 and 1 at first, are halved, so that a matrix does
    not change the size of what it multiplies and the logits are a few times one."""
    if "embed_tokens" in name:
        return 3
    return round(math.log2(math.sqrt(shape[1] / 3)))


def prompt() -> np.ndarray:
    return draws.tokens("wide prompt", PROMPT, DRAFTER["dflash_config"]["mask_token_id"])


def recorded_tokens(logits: np.ndarray) -> np.ndarray:
    """For every row of logits, the token ids whose log probabilities are recorded."""
    likeliest = np.argsort(-logits, axis=-1)[:, :LIKELIEST]
    others = draws.tokens("wide others", logits.shape[0] * OTHERS, logits.shape[1])
    return np.concatenate([likeliest, others.reshape(-1, OTHERS)], axis=1).astype(np.int32)


def log_probabilities(logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Log probabilities of these ids in every row, computed in float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return np.take_along_axis(wide, tokens, axis=-1).astype(np.float32)
