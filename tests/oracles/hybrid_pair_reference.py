"""Greedy speculative decoding with transformers' Qwen3.5 and the formula of a DFlash drafter.
Everything is computed anew in every step, without a cache."""

import json
import pathlib

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import Qwen3_5ForCausalLM

from oracles.dflash_reference import Weights, forward

PAIR = pathlib.Path(__file__).resolve().parent.parent / "data" / "hybrid_pair"
COMMITTED = 48
"""A run ends after this many tokens."""
CLEAR = 3e-4
"""The least lead of a token that rounding cannot undo. Runs with smaller leads are left out."""


def record_pair() -> dict:
    target = Qwen3_5ForCausalLM.from_pretrained(
        PAIR / "target", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    prompts = json.loads((PAIR / "prompts.json").read_text())
    runs = [one for one in (run(target, prompt) for prompt in prompts) if one["min_margin"] > CLEAR]
    lengths = [length for one in runs for length in one["acceptance_lengths"]]
    return {"mean_acceptance_length": float(np.mean(lengths)), "trajectories": runs}


def run(target: Qwen3_5ForCausalLM, prompt: list[int]) -> dict:
    """The tokens, how many of them each step committed, and the smallest lead of a chosen token."""
    config = json.loads((PAIR / "draft" / "config.json").read_text())
    stored = load_file(PAIR / "draft" / "model.safetensors")
    weights = Weights(lambda name, shape: stored[name].float().numpy(), dtype=torch.float32)
    tokens, lengths, margins = list(prompt), [], []

    def choices(read: list[int]) -> tuple[list[int], torch.Tensor]:
        out = target(torch.tensor(read)[None], use_cache=False, output_hidden_states=True)
        margins.extend(leads(out.logits[0, len(tokens) - 1 :]))
        ids = config["dflash_config"]["target_layer_ids"]
        return out.logits[0].argmax(-1).tolist(), torch.cat(
            [out.hidden_states[i + 1][0] for i in ids], dim=-1
        )

    tokens.append(choices(tokens)[0][-1])
    mask, width = config["dflash_config"]["mask_token_id"], config["block_size"]
    masks = [(False, None)] * config["num_hidden_layers"]
    while sum(lengths) < COMMITTED:
        _, features = choices(tokens)
        block = target.model.embed_tokens(torch.tensor([tokens[-1], *[mask] * (width - 1)]))
        hidden, _, _ = forward(config, masks, features[:-1], block, weights)
        logits = target.lm_head(hidden[1:].float())
        margins.extend(leads(logits))
        drafts = logits.argmax(-1).tolist()
        chosen = choices([*tokens, *drafts])[0][len(tokens) - 1 :]
        accepted = next((i for i in range(width - 1) if drafts[i] != chosen[i]), width - 1)
        tokens += chosen[: accepted + 1]
        lengths.append(accepted + 1)
    return {
        "prompt": prompt,
        "tokens": tokens[len(prompt) :],
        "acceptance_lengths": lengths,
        "min_margin": min(margins),
    }


def leads(logits: torch.Tensor) -> list[float]:
    best = logits.topk(2, dim=-1).values
    return (best[:, 0] - best[:, 1]).tolist()
