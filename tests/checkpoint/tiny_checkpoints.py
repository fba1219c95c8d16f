"""Checkpoint folders small enough to write in a test, in every layout that can be read."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike
from safetensors.numpy import save_file

from oracles import draws
from oracles.folders import drafter_shapes, target_shapes

Tensors = dict[str, np.ndarray]

DECODER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 128,
    "attention_bias": False,
    "vocab_size": 40,
}
TARGET = DECODER | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 3,
    "tie_word_embeddings": False,
    "eos_token_id": 7,
}
ZLAB = DECODER | {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 4,
    "num_target_layers": 3,
    "dflash_config": {"mask_token_id": 39, "target_layer_ids": [0, 1]},
}
KEPT = np.array([0, 3, 4, 9, 11, 20, 38])
SPECULATORS = {
    "architectures": ["DFlashDraftModel"],
    "speculators_model_type": "dflash",
    "block_size": 4,
    "mask_token_id": 39,
    "aux_hidden_state_layer_ids": [1, 2],
    "draft_vocab_size": len(KEPT),
    "transformer_layer_config": DECODER | {"model_type": "qwen3"},
    "speculators_config": {
        "algorithm": "dflash",
        "verifier": {"name_or_path": "../target", "architectures": ["Qwen3ForCausalLM"]},
    },
}


def target_tensors(config: dict = TARGET, dtype: DTypeLike = np.float32) -> Tensors:
    return _drawn(target_shapes(config), dtype)


def zlab_tensors(config: dict = ZLAB, dtype: DTypeLike = np.float32) -> Tensors:
    return _drawn(drafter_shapes(config), dtype)


def speculators_tensors(config: dict = SPECULATORS, dtype: DTypeLike = np.float32) -> Tensors:
    decoder, draft_vocab = config["transformer_layer_config"], config["draft_vocab_size"]
    ids = {"target_layer_ids": config["aux_hidden_state_layer_ids"]}
    vocab, hidden = decoder["vocab_size"], decoder["hidden_size"]
    shapes = drafter_shapes(decoder | {"dflash_config": ids})
    shapes |= {"embed_tokens.weight": (vocab, hidden), "lm_head.weight": (draft_vocab, hidden)}
    tensors = _drawn(shapes, dtype)
    if draft_vocab < vocab:
        tensors |= {"d2t": KEPT - np.arange(draft_vocab), "t2d": np.isin(np.arange(vocab), KEPT)}
    return tensors


def _drawn(shapes: dict, dtype: DTypeLike) -> Tensors:
    return {name: draws.weight(name, shape).astype(dtype) for name, shape in shapes.items()}


BF16 = np.dtype(ml_dtypes.bfloat16)


def write(folder: Path, config: dict, tensors: Tensors, shards: int = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    file_of = {}
    for shard, names in enumerate(np.array_split(sorted(tensors), shards), start=1):
        file = f"model-{shard:05d}-of-{shards:05d}.safetensors"
        save_file({str(name): tensors[name] for name in names}, folder / file)
        file_of |= {str(name): file for name in names}
    write_index(folder, file_of)
    return folder


def write_index(folder: Path, file_of: dict[str, str]) -> None:
    index = {"metadata": {}, "weight_map": file_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
