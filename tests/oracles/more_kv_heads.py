"""Writes a golden drafter with twice as many key and value heads: the same function, in sizes that
FP8 weights in blocks can have.

Every head of keys and of values is stored twice, and each copy has half of the query heads.
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from jaxspec.checkpoint.safetensors_folder import stored_tensors
from jaxspec.checkpoint.stream import read_tensor

DOUBLED = ("k_proj.weight", "v_proj.weight")


def with_more_kv_heads(source: Path, folder: Path) -> Path:
    """Writes the folder and returns it."""
    config = json.loads((source / "config.json").read_text())
    width, kv_heads = config["head_dim"], config["num_key_value_heads"]
    tensors = {name: read_tensor(tensor) for name, tensor in stored_tensors(source).items()}
    for name, tensor in tensors.items():
        if name.endswith(DOUBLED):
            by_head = tensor.reshape(kv_heads, width, -1)
            tensors[name] = by_head.repeat(2, axis=0).reshape(-1, tensor.shape[1])
    folder.mkdir(parents=True, exist_ok=True)
    changed = config | {"num_key_value_heads": 2 * kv_heads}
    (folder / "config.json").write_text(json.dumps(changed))
    whole = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    save_file(whole, folder / "model.safetensors")
    return folder
