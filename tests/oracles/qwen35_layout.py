"""The folder of a tiny Qwen3.5 with its vision part as transformers saves it, reduced to the names
and shapes of its tensors."""

import json
import pathlib
import tempfile

from safetensors import safe_open
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from oracles.qwen35_cases import CASES

TEXT = CASES["untied"]["config"] | {
    "num_hidden_layers": 4,
    "layer_types": CASES["tied"]["config"]["layer_types"],
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "output_gate_type": "swish",
}
VISION = {
    "depth": 1,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_heads": 2,
    "patch_size": 2,
    "num_position_embeddings": 4,
    "out_hidden_size": 64,
}


def layout() -> dict:
    """The config.json, and every tensor of the folder with its shape."""
    text = {key: value for key, value in TEXT.items() if key != "architectures"}
    model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=VISION))
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        model.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        with safe_open(folder / "model.safetensors", "np") as file:
            shapes = {key: file.get_slice(key).get_shape() for key in sorted(file.keys())}
    return {"config": config, "tensors": shapes | mtp_shapes()}


def mtp_shapes() -> dict[str, list[int]]:
    """Tensors of the multi-token head of published folders, which transformers ignores."""
    hidden, inner, head_dim = TEXT["hidden_size"], TEXT["intermediate_size"], TEXT["head_dim"]
    queries = TEXT["num_attention_heads"] * head_dim
    keys = TEXT["num_key_value_heads"] * head_dim
    layer = {
        "input_layernorm": [hidden],
        "self_attn.q_proj": [2 * queries, hidden],
        "self_attn.k_proj": [keys, hidden],
        "self_attn.v_proj": [keys, hidden],
        "self_attn.o_proj": [hidden, queries],
        "self_attn.q_norm": [head_dim],
        "self_attn.k_norm": [head_dim],
        "post_attention_layernorm": [hidden],
        "mlp.gate_proj": [inner, hidden],
        "mlp.up_proj": [inner, hidden],
        "mlp.down_proj": [hidden, inner],
    }
    return {
        "mtp.fc.weight": [hidden, 2 * hidden],
        "mtp.norm.weight": [hidden],
        "mtp.pre_fc_norm_embedding.weight": [hidden],
        "mtp.pre_fc_norm_hidden.weight": [hidden],
    } | {f"mtp.layers.0.{name}.weight": shape for name, shape in layer.items()}
