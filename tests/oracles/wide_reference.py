"""What transformers' Qwen3 and the drafter's formula give for the model of wide_case.py, in float32
and in bfloat16."""

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from oracles import dflash_reference, wide_case


def run_wide() -> dict[str, np.ndarray]:
    """For each model the token ids, and their log probabilities in float32 and in bfloat16."""
    outputs = {}
    for dtype in (torch.float32, torch.bfloat16):
        target, drafter = logits_of(dtype)
        for name, logits in (("target", target), ("drafter", drafter)):
            if dtype == torch.float32:
                outputs[f"{name}_tokens"] = wide_case.recorded_tokens(logits)
            tokens = outputs[f"{name}_tokens"]
            label = str(dtype).removeprefix("torch.")
            outputs[f"{name}_{label}"] = wide_case.log_probabilities(logits, tokens)
    return outputs


def logits_of(dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Logits after every token of the prompt, and of the drafts in the block that starts with the
    last one."""
    model = build(dtype)
    prompt = torch.from_numpy(wide_case.prompt())[None].long()
    start = wide_case.PROMPT - 1
    config = wide_case.DRAFTER
    out = model(prompt, output_hidden_states=True, use_cache=False)
    after = [out.hidden_states[i + 1][0] for i in config["dflash_config"]["target_layer_ids"]]
    features = torch.cat(after, dim=-1)[:start]
    block = torch.full((config["block_size"],), config["dflash_config"]["mask_token_id"])
    block[0] = prompt[0, start]
    embedded = model.model.embed_tokens(block)
    source = dflash_reference.Weights(wide_case.weight, "draft.", dtype)
    hidden, _, _ = dflash_reference.forward(config, wide_case.MASKS, features, embedded, source)
    drafts = model.lm_head(hidden[1:])
    return out.logits[0].float().numpy(), drafts.float().numpy()


def build(dtype: torch.dtype) -> Qwen3ForCausalLM:
    model = Qwen3ForCausalLM._from_config(
        Qwen3Config(**wide_case.TARGET), dtype=dtype, attn_implementation="eager"
    ).eval()
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":  # tied
            tensor.copy_(torch.from_numpy(wide_case.weight(name, tuple(tensor.shape))))
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    return model
