"""A linear layer of a recorded Qwen3.5 model in float64, and its state after every token."""

import numpy as np

from oracles import gated_delta_numpy as delta
from oracles import hybrid_draws, qwen35_shapes, records


def layer_weights(config: dict, layer: int) -> dict[str, np.ndarray]:
    shapes = qwen35_shapes.layer_shapes(config, config["layer_types"][layer])
    prefix = f"model.layers.{layer}."
    return {
        name: hybrid_draws.weight(prefix + name, shape).astype(np.float64)
        for name, shape in shapes.items()
    }


def of_mixer(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    prefix = "linear_attn."
    return {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}


def linear_layers(config: dict) -> list[int]:
    return [i for i, kind in enumerate(config["layer_types"]) if kind == "linear_attention"]


def residual_before(record: records.Record, layer: int) -> np.ndarray:
    if layer:
        return record.outputs["after_layers"][layer - 1].astype(np.float64)
    config = record.config
    table = (config["vocab_size"], config["hidden_size"])
    embedding = hybrid_draws.weight("model.embed_tokens.weight", table)
    return embedding[record.prompt].astype(np.float64)


def layer_in_float64(record: records.Record, layer: int) -> tuple[np.ndarray, list[delta.State]]:
    """The residual stream after the layer, and the layer's state after every token."""
    config, weights = record.config, layer_weights(record.config, layer)
    sizes, eps = delta.sizes_of(config), config["rms_norm_eps"]
    x = residual_before(record, layer)
    normed = delta.centred_norm(x, weights["input_layernorm.weight"], eps)
    taps = config["linear_conv_kernel_dim"]
    mixed, states = delta.mix(sizes, of_mixer(weights), normed, delta.empty(sizes, taps))
    x = x + mixed
    normed = delta.centred_norm(x, weights["post_attention_layernorm.weight"], eps)
    gate, up, down = (weights[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return x + (delta.silu(normed @ gate.T) * (normed @ up.T)) @ down.T, states
