"""The grid of tiny Qwen3 models whose outputs are recorded, as config.json files spell them."""

import itertools

PROMPT = 24
"""Tokens per prompt."""

BASE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 61,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 59,
    "eos_token_id": 60,
}

ROPES = {
    "flat": {"rope_theta": 1000000},
    "parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
}

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
"""The prompt reaches past the original context."""


def _case(**changes) -> dict:
    return {"config": BASE | changes, "prompt": PROMPT}


CASES = {
    f"{'tied' if tied else 'untied'}_gqa{group}_{rope}": _case(
        tie_word_embeddings=tied, num_key_value_heads=8 // group, **ROPES[rope]
    )
    for tied, group, rope in itertools.product((True, False), (1, 2, 4, 8), ROPES)
} | {
    "yarn_flat": _case(
        rope_theta=1000000.0, rope_scaling=YARN, hidden_size=64, head_dim=32, num_attention_heads=4
    ),
    "yarn_parameters": _case(
        rope_parameters=YARN | {"rope_theta": 1000000.0, "beta_fast": 8.0, "beta_slow": 0.5},
        tie_word_embeddings=True,
        head_dim=32,
    ),
    "yarn_untruncated": _case(
        rope_parameters=YARN | {"rope_theta": 5000.0, "truncate": False, "attention_factor": 1.25},
        head_dim=32,
    ),
    "deep": _case(
        **ROPES["flat"], num_hidden_layers=6, rms_norm_eps=0.01, num_key_value_heads=2, head_dim=8
    ),
    "one_layer": _case(**ROPES["parameters"], num_hidden_layers=1, num_attention_heads=4),
}
