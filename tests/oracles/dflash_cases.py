"""Tiny DFlash drafters whose outputs are recorded, as z-lab's config.json spells them.

`masks` says for each layer whether block rows are causal, and how wide their window is. `accepted`
has the number of drafts accepted after each step, from which the starts of the blocks follow.
"""

import itertools

BASE = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 61,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "rope_theta": 1000000,
    "block_size": 8,
    "num_target_layers": 12,
    "dflash_config": {"mask_token_id": 60, "target_layer_ids": [1, 8]},
}

FULL = (False, None)


def _case(masks: list[tuple[bool, int | None]], ids: list[int] = (1, 8), **changes) -> dict:
    config = BASE | {"num_hidden_layers": len(masks)} | changes
    config["dflash_config"] = {"mask_token_id": 60, "target_layer_ids": list(ids)}
    windows = {window for _, window in masks if window}
    if windows:
        (config["sliding_window"],) = windows
        config["use_sliding_window"] = True
        config["layer_types"] = [
            "sliding_attention" if window else "full_attention" for _, window in masks
        ]
    return {
        "config": config,
        "masks": [list(mask) for mask in masks],
        "prompt": 13,
        "accepted": [3, 0, config["block_size"] - 1],
    }


def block_starts(case: dict) -> list[int]:
    """The position of the current token in each step: the end of the prompt, and from then on the
    end of what was committed."""
    committed = (accepted + 1 for accepted in case["accepted"])
    return list(itertools.accumulate(committed, initial=case["prompt"]))


CASES = {
    "full": _case([FULL] * 3),
    "one_layer_one_feature": _case([FULL], ids=[5], block_size=4, num_key_value_heads=4),
    "many_features": _case(
        [FULL] * 2, ids=[0, 3, 5, 8, 10], block_size=16, num_attention_heads=8,
        num_key_value_heads=1, head_dim=8, rms_norm_eps=0.01,
    ),
    "yarn": _case(
        [FULL] * 2,
        head_dim=32,
        rope_theta=10000000,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 64.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
    ),
    "sliding_causal": _case([(True, 6)] * 2),
    "sliding_both_ways": _case([(False, 6)] * 2, is_causal=False),
    "sliding_then_full": _case([(True, 10), (True, 10), FULL]),
}  # fmt: skip
