"""Parameters of our models straight from the drawn weights, without a checkpoint in between."""

import re

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from oracles import draws
from oracles.folders import drafter_shapes, target_shapes

INSIDE_LAYER = {
    "attention/norm/scale": ["input_layernorm"],
    "attention/qkv/kernel": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "attention/q_norm/scale": ["self_attn.q_norm"],
    "attention/k_norm/scale": ["self_attn.k_norm"],
    "attention/out/kernel": ["self_attn.o_proj"],
    "mlp/norm/scale": ["post_attention_layernorm"],
    "mlp/gate_up/kernel": ["mlp.gate_proj", "mlp.up_proj"],
    "mlp/down/kernel": ["mlp.down_proj"],
}
TARGET = {
    "embedding/embedding": "model.embed_tokens.weight",
    "norm/scale": "model.norm.weight",
    "head/kernel": "lm_head.weight",
}
DRAFTER = {
    "feature_projection/kernel": "fc.weight",
    "feature_norm/scale": "hidden_norm.weight",
    "norm/scale": "norm.weight",
}


def target_params(config: dict, paths: list[str]) -> dict:
    return _params(paths, target_shapes(config), TARGET, "model.")


def drafter_params(config: dict, paths: list[str]) -> dict:
    return _params(paths, drafter_shapes(config), DRAFTER, "")


def _params(paths: list[str], shapes: dict, outside: dict[str, str], prefix: str) -> dict:
    flat = {}
    for path in paths:
        if inside := re.fullmatch(r"layers_(\d+)/(.*)", path):
            at = f"{prefix}layers.{inside[1]}."
            names = [f"{at}{name}.weight" for name in INSIDE_LAYER[inside[2]]]
        else:
            names = [outside[path]]
        fused = np.concatenate([draws.weight(name, shapes[name]) for name in names])
        flat[path] = jnp.asarray(fused.T if path.endswith("kernel") else fused)
    return unflatten_dict(flat, sep="/")
