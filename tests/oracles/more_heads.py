"""Writes a golden drafter with more heads: the same function, in sizes that FP8 weights in blocks
can have.

Every head is stored several times, one copy after the other, and what copies of a query head give
is divided by their number. The MLP's inner axis is padded with zeros.
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from jaxspec.checkpoint.safetensors_folder import stored_tensors
from jaxspec.checkpoint.stream import read_tensor


def with_more_heads(
    source: Path,
    folder: Path,
    query_copies: int = 1,
    kv_copies: int = 2,
    inner: int | None = None,
) -> Path:
    """Writes the folder and returns it."""
    config = json.loads((source / "config.json").read_text())
    inner = config["intermediate_size"] if inner is None else inner
    more = inner - config["intermediate_size"]

    def changed(name: str, tensor: np.ndarray) -> np.ndarray:
        if name.endswith("q_proj.weight"):
            return repeated(tensor, query_copies, config["head_dim"])
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            return repeated(tensor, kv_copies, config["head_dim"])
        if name.endswith("o_proj.weight"):
            return repeated(tensor.T, query_copies, config["head_dim"]).T / query_copies
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            return np.pad(tensor, ((0, more), (0, 0)))
        return np.pad(tensor, ((0, 0), (0, more))) if name.endswith("down_proj.weight") else tensor

    tensors = {name: read_tensor(tensor) for name, tensor in stored_tensors(source).items()}
    whole = {
        name: np.ascontiguousarray(changed(name, tensor).astype(tensor.dtype))
        for name, tensor in tensors.items()
    }
    sizes = {
        "num_attention_heads": query_copies * config["num_attention_heads"],
        "num_key_value_heads": kv_copies * config["num_key_value_heads"],
        "intermediate_size": inner,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | sizes))
    save_file(whole, folder / "model.safetensors")
    return folder


def repeated(rows: np.ndarray, copies: int, head_dim: int) -> np.ndarray:
    """A matrix whose rows belong to heads, with every head so many times."""
    by_head = rows.reshape(-1, head_dim, rows.shape[1])
    return by_head.repeat(copies, axis=0).reshape(-1, rows.shape[1])
