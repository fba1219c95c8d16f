"""Tensors of a Qwen3.5 text model: their names in a text-only folder, and their shapes."""

Shapes = dict[str, tuple[int, ...]]

TEXT_ONLY = "model."
"""The beginning of the names of the layers, the embedding and the last norm."""
VISION_LANGUAGE = "model.language_model."
"""The same in a folder that also has a vision part."""


def shapes(config: dict, prefix: str = TEXT_ONLY) -> Shapes:
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    named = {"embed_tokens.weight": (vocab, hidden), "norm.weight": (hidden,)}
    for i, kind in enumerate(config["layer_types"]):
        named |= {f"layers.{i}.{name}": shape for name, shape in layer_shapes(config, kind).items()}
    named = {prefix + name: shape for name, shape in named.items()}
    return named if config["tie_word_embeddings"] else named | {"lm_head.weight": (vocab, hidden)}


def layer_shapes(config: dict, kind: str) -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    mixer = linear_shapes(config) if kind == "linear_attention" else attention_shapes(config)
    return mixer | {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }


def attention_shapes(config: dict) -> Shapes:
    """Shapes of an attention layer, whose query projection has a gate after each head's query."""
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    queries = config["num_attention_heads"] * head_dim
    keys = config["num_key_value_heads"] * head_dim
    return {
        "self_attn.q_proj.weight": (2 * queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (head_dim,),
        "self_attn.k_norm.weight": (head_dim,),
    }


def linear_shapes(config: dict) -> Shapes:
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = heads * config["linear_value_head_dim"]
    channels = 2 * keys + values
    return {
        "linear_attn.in_proj_qkv.weight": (channels, hidden),
        "linear_attn.in_proj_z.weight": (values, hidden),
        "linear_attn.in_proj_b.weight": (heads, hidden),
        "linear_attn.in_proj_a.weight": (heads, hidden),
        "linear_attn.conv1d.weight": (channels, 1, config["linear_conv_kernel_dim"]),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.A_log": (heads,),
        "linear_attn.norm.weight": (config["linear_value_head_dim"],),
        "linear_attn.out_proj.weight": (hidden, values),
    }
