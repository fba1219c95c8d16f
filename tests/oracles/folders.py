"""Writes checkpoint folders of the recorded models: drawn weights under their published names."""

import json
import pathlib
from collections.abc import Callable

import numpy as np
from safetensors.numpy import save_file

from oracles import draws, hybrid_draws, qwen35_shapes

Shapes = dict[str, tuple[int, ...]]
Draw = Callable[[str, tuple[int, ...]], np.ndarray]


def write_target(folder: pathlib.Path, config: dict, shards: int = 1) -> pathlib.Path:
    """A Hugging Face Qwen3 folder, in one file or in shards with their index."""
    return _write(folder, config, target_shapes(config), shards)


def write_hybrid(folder: pathlib.Path, config: dict, shards: int = 1) -> pathlib.Path:
    """A Qwen3.5 folder without a vision part."""
    return _write(folder, config, qwen35_shapes.shapes(config), shards, hybrid_draws.weight)


def write_drafter(folder: pathlib.Path, config: dict) -> pathlib.Path:
    """A DFlash folder in z-lab's layout."""
    return _write(folder, config, drafter_shapes(config), shards=1)


def target_shapes(config: dict) -> Shapes:
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    shapes = {f"model.{name}": shape for name, shape in _decoder_shapes(config).items()}
    shapes |= {"model.embed_tokens.weight": (vocab, hidden)}
    return shapes if config["tie_word_embeddings"] else shapes | {"lm_head.weight": (vocab, hidden)}


def drafter_shapes(config: dict) -> Shapes:
    hidden, ids = config["hidden_size"], config["dflash_config"]["target_layer_ids"]
    shapes = {"fc.weight": (hidden, hidden * len(ids)), "hidden_norm.weight": (hidden,)}
    return shapes | _decoder_shapes(config)


def _decoder_shapes(config: dict) -> Shapes:
    hidden, inner, head_dim = (
        config[key] for key in ("hidden_size", "intermediate_size", "head_dim")
    )
    queries = config["num_attention_heads"] * head_dim
    keys = config["num_key_value_heads"] * head_dim
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (head_dim,),
        "self_attn.k_norm": (head_dim,),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    return {"norm.weight": (hidden,)} | {
        f"layers.{i}.{name}.weight": shape
        for i in range(config["num_hidden_layers"])
        for name, shape in layer.items()
    }


def _write(
    folder: pathlib.Path, config: dict, shapes: Shapes, shards: int, drawn: Draw = draws.weight
) -> pathlib.Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: drawn(name, shape) for name, shape in shapes.items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    index = {}
    for shard, held in enumerate(np.array_split(sorted(tensors), shards), start=1):
        file = f"model-{shard:05d}-of-{shards:05d}.safetensors"
        save_file({str(name): tensors[name] for name in held}, folder / file)
        index |= {str(name): file for name in held}
    size = sum(tensor.nbytes for tensor in tensors.values())
    document = {"metadata": {"total_size": size}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(document))
    return folder
