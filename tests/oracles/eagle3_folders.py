"""EAGLE-3 checkpoints in each published layout, small enough to write in a test."""

import numpy as np

from oracles import draws

Shapes = dict[str, tuple[int, ...]]

DECODER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 64,
    "attention_bias": False,
    "vocab_size": 40,
}
KEPT = np.array([0, 3, 4, 9, 11, 20, 38])
SPECFORGE = DECODER | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "draft_vocab_size": len(KEPT),
    "tie_word_embeddings": False,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True},
}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "draft_vocab_size": len(KEPT),
    "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    "embed_requires_grad": False,
    "fc_norm": False,
    "norm_before_fc": False,
    "norm_before_residual": True,
    "norm_output": False,
    "target_hidden_size": None,
    "transformer_layer_config": DECODER | {"model_type": "llama"},
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"name_or_path": "../target", "architectures": ["Qwen3ForCausalLM"]},
    },
}
DEEPSPEC = DECODER | {
    "architectures": ["Qwen3Eagle3Model"],
    "model_type": "qwen3",
    "target_layer_ids": [0, 1, 2, 3, 4],
    "num_target_layers": 6,
    "ttt_length": 7,
    "step_loss_decay": 0.8,
    "draft_num_hidden_layers": 1,
    "tie_word_embeddings": False,
}


def shapes(
    config: dict,
    *,
    first: str = "layers.0",
    features: int = 3,
    head_norms: bool = False,
    own_table: bool = False,
) -> Shapes:
    """The names and shapes of the tensors, as the tables of the layouts give them."""
    decoder = config.get("transformer_layer_config", config)
    hidden, vocab = decoder["hidden_size"], decoder["vocab_size"]
    of_target = config.get("target_hidden_size") or hidden
    drafted = config.get("draft_vocab_size") or vocab
    held = {
        "fc.weight": (hidden, features * of_target),
        "norm.weight": (hidden,),
        "lm_head.weight": (drafted, hidden),
    }
    for i in range(decoder["num_hidden_layers"]):
        name = first if i == 0 else f"layers.{i}"
        held |= {f"{name}.{k}": v for k, v in _layer(decoder, i == 0, head_norms).items()}
    if own_table:
        held["embed_tokens.weight"] = (vocab, hidden)
    if config.get("norm_before_fc"):
        held["input_norm.weight"] = (features * of_target,)
    if config.get("fc_norm"):
        held |= {f"fc_norm.{i}.weight": (of_target,) for i in range(features)}
    return held


def _layer(decoder: dict, first: bool, head_norms: bool) -> Shapes:
    hidden, inner, head = (decoder[k] for k in ("hidden_size", "intermediate_size", "head_dim"))
    queries = decoder["num_attention_heads"] * head
    keys, inputs = decoder["num_key_value_heads"] * head, 2 * hidden if first else hidden
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (queries, inputs),
        "self_attn.k_proj": (keys, inputs),
        "self_attn.v_proj": (keys, inputs),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    if first:
        layer["hidden_norm"] = (hidden,)
    if head_norms:
        layer |= {"self_attn.q_norm": (head,), "self_attn.k_norm": (head,)}
    return {f"{name}.weight": shape for name, shape in layer.items()}


def ids(vocab: int) -> dict[str, np.ndarray]:
    """The two tensors of a reduced vocabulary."""
    return {"d2t": KEPT - np.arange(len(KEPT)), "t2d": np.isin(np.arange(vocab), KEPT)}


def tensors(config: dict, **options) -> dict[str, np.ndarray]:
    """The weights of such a checkpoint, drawn by their names."""
    held = shapes(config, **options)
    decoder = config.get("transformer_layer_config", config)
    drawn = {name: draws.weight(name, shape) for name, shape in held.items()}
    reduced = config.get("draft_vocab_size") == len(KEPT)
    return drawn | (ids(decoder["vocab_size"]) if reduced else {})
