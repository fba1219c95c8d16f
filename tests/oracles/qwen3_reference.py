"""Outputs of transformers' Qwen3 in float32."""

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from oracles import draws


def run_target(case: dict) -> dict[str, np.ndarray]:
    """Logits, and the residual stream after every layer."""
    model = build(case["config"])
    last = []
    model.model.layers[-1].register_forward_hook(lambda *call: last.append(_first(call[2])))
    prompt = draws.tokens("prompt", case["prompt"], case["config"]["vocab_size"])
    out = model(torch.from_numpy(prompt)[None].long(), output_hidden_states=True, use_cache=False)
    # The last entry of hidden_states is normed; the hook has the output of the layer before that.
    after = [*out.hidden_states[1:-1], last[0]]
    assert torch.equal(model.model.norm(last[0]), out.hidden_states[-1])
    return {"logits": out.logits[0].numpy(), "after_layers": torch.cat(after).numpy()}


def build(config: dict) -> Qwen3ForCausalLM:
    model = Qwen3ForCausalLM._from_config(
        Qwen3Config(**config), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    drawn = {
        name: torch.from_numpy(draws.weight(name, tuple(tensor.shape)))
        for name, tensor in model.state_dict().items()
        if not (config["tie_word_embeddings"] and name == "lm_head.weight")
    }
    missing, unexpected = model.load_state_dict(drawn, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    _check_rope_was_understood(model, config)
    return model


def _check_rope_was_understood(model: Qwen3ForCausalLM, config: dict) -> None:
    """transformers drops keys that it does not know; make sure that it read ours."""
    asked = {"rope_theta": config.get("rope_theta")} | config.get("rope_scaling", {})
    asked |= config.get("rope_parameters", {})
    read = model.config.rope_parameters
    assert all(read.get(key) == value for key, value in asked.items() if value), (asked, read)
    assert config["tie_word_embeddings"] == (
        model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    )


def _first(output: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output[0]
