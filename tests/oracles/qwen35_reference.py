"""Outputs of transformers' Qwen3.5 text model in float32."""

import numpy as np
import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.cache_utils import DynamicCache

from oracles import draws, hybrid_draws

CONTINUED = 24
"""Tokens of every greedy continuation."""
CLEAR = 1e-3
"""The least lead of a chosen token's logit, so that rounding cannot choose another token."""


def run_hybrid(case: dict) -> dict[str, np.ndarray]:
    """Logits, final hidden states, the residual stream after every layer, the states of the linear
    layers after the prefix and after the whole prompt, and greedy continuations."""
    model = build(case["config"])
    tokens = torch.from_numpy(prompt_of(case)).long()
    after = []
    hooks = [
        layer.register_forward_hook(lambda module, inputs, output: after.append(_first(output)[0]))
        for layer in model.model.layers
    ]
    out = model(tokens[None], use_cache=False, output_hidden_states=True)
    for hook in hooks:
        hook.remove()
    hidden = out.hidden_states[-1][0]
    assert torch.equal(model.model.norm(after[-1]), hidden)
    outputs = {"logits": out.logits[0], "hidden": hidden, "after_layers": torch.stack(after)}
    outputs |= stepwise(model, tokens, case["prefix"])
    error = (outputs["decoded"] - out.logits[0, case["prefix"] :]).abs().max()
    assert error < 1e-4 * out.logits.abs().max(), error
    arrays = {name: tensor.numpy() for name, tensor in outputs.items()}
    return arrays | {"greedy": np.stack([continued(model, tokens[:n]) for n in case["greedy"]])}


def prompt_of(case: dict) -> np.ndarray:
    return draws.tokens("prompt", case["prompt"], case["config"]["vocab_size"])


def stepwise(
    model: Qwen3_5ForCausalLM, tokens: torch.Tensor, prefix: int
) -> dict[str, torch.Tensor]:
    """Reads the prefix at once and the rest token by token, with a cache."""
    cache = DynamicCache(config=model.config)
    model(tokens[None, :prefix], past_key_values=cache, use_cache=True)
    at_prefix = states_of(model, cache)
    decoded = [
        model(tokens[None, i : i + 1], past_key_values=cache, use_cache=True).logits[0, 0]
        for i in range(prefix, len(tokens))
    ]
    at_end = states_of(model, cache)
    if model.config.linear_key_head_dim > 16:
        # Large states are left to the second oracle.
        return {"decoded": torch.stack(decoded)}
    return {
        "decoded": torch.stack(decoded),
        "prefix_states": at_prefix[0],
        "prefix_convolutions": at_prefix[1],
        "states": at_end[0],
        "convolutions": at_end[1],
    }


def states_of(model: Qwen3_5ForCausalLM, cache: DynamicCache) -> tuple[torch.Tensor, torch.Tensor]:
    """The states of all linear layers [layer, head, key, value], and the last inputs of their
    convolutions [layer, channel, tap], which are one fewer than the taps."""
    linear = [i for i, kind in enumerate(model.config.layer_types) if kind == "linear_attention"]
    states = [cache.layers[i].recurrent_states[0][0] for i in linear]
    inputs = [cache.layers[i].conv_states[0][0, :, 1:] for i in linear]
    return torch.stack(states).clone(), torch.stack(inputs).clone()


def continued(model: Qwen3_5ForCausalLM, prompt: torch.Tensor) -> np.ndarray:
    """The likeliest tokens, each from a forward over everything before it."""
    tokens = prompt
    for _ in range(CONTINUED):
        logits = model(tokens[None], use_cache=False).logits[0, -1]
        best = logits.topk(2)
        assert best.values[0] - best.values[1] > CLEAR * logits.abs().max(), best.values
        tokens = torch.cat([tokens, best.indices[:1]])
    return tokens[len(prompt) :].numpy().astype(np.int32)


def build(config: dict) -> Qwen3_5ForCausalLM:
    read = Qwen3_5TextConfig(**config)
    model = Qwen3_5ForCausalLM._from_config(
        read, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    drawn = {
        name: torch.from_numpy(hybrid_draws.weight(name, tuple(tensor.shape)))
        for name, tensor in model.state_dict().items()
        if not (config["tie_word_embeddings"] and name == "lm_head.weight")
    }
    missing, unexpected = model.load_state_dict(drawn, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    _check_config_was_understood(model, config)
    return model


def _check_config_was_understood(model: Qwen3_5ForCausalLM, config: dict) -> None:
    """transformers drops keys that it does not know; make sure that it read ours."""
    read, rope = model.config, config["rope_parameters"]
    assert all(read.rope_parameters.get(key) == value for key, value in rope.items())
    assert read.layer_types == config["layer_types"]
    rotated = 2 * model.model.rotary_emb.inv_freq.numel()
    assert rotated == int(config["head_dim"] * rope["partial_rotary_factor"])
    assert config["tie_word_embeddings"] == (
        model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    )


def _first(output: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output[0]
