"""Tiny Qwen3.5 text models whose outputs are recorded, as config.json files spell them."""

BASE = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "dtype": "float32",
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 80,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
    },
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 97,
    "eos_token_id": 96,
}

PREFIX = 21
"""Tokens that are read at once before the rest of the prompt is decoded one by one."""

GREEDY = [5, 11, 23]
"""Lengths of the prompts that are continued greedily."""


def _case(prompt: int = 40, **changes) -> dict:
    rope = changes.pop("rope", {})
    config = BASE | changes
    config["rope_parameters"] = BASE["rope_parameters"] | rope
    if "layer_types" not in config:
        interval = config["full_attention_interval"]
        config["layer_types"] = [
            "linear_attention" if (i + 1) % interval else "full_attention"
            for i in range(config["num_hidden_layers"])
        ]
    return {"config": config, "prompt": prompt, "prefix": PREFIX, "greedy": GREEDY}


CASES = {
    "untied": _case(),
    "tied": _case(tie_word_embeddings=True, num_hidden_layers=4, rope={"rope_theta": 10000.0}),
    # Longer than a chunk of 64 tokens; all queries share a key, and epsilon is large.
    "long": _case(
        prompt=83,
        hidden_size=40,
        num_hidden_layers=4,
        num_key_value_heads=1,
        rms_norm_eps=0.01,
        rope={"partial_rotary_factor": 0.5},
    ),
    # Heads of the published sizes, with three value heads per key head as in 27B.
    "published_heads": _case(
        hidden_size=48,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=256,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=1,
        linear_num_value_heads=3,
    ),
    # As many key heads as value heads, and a last layer without full attention.
    "equal_heads": _case(
        hidden_size=40,
        num_hidden_layers=5,
        full_attention_interval=2,
        linear_num_key_heads=3,
        linear_num_value_heads=3,
        tie_word_embeddings=True,
    ),
}
