"""Writes a golden FP8 target as a float32 folder, for tests of code that rounds to FP8 itself."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from jaxspec.checkpoint.safetensors_folder import stored_tensors
from jaxspec.checkpoint.stream import read_tensor

BLOCK = 128


def widened(source: Path, folder: Path, noise: float = 0.0) -> Path:
    """Writes the folder and returns it. Its matrices are those of `source`, which has scales of
    blocks, so rounding them gives the same numbers again. With `noise` they have relative errors of
    about that size."""
    draw = np.random.default_rng(0)
    tensors = {name: read_tensor(tensor) for name, tensor in stored_tensors(source).items()}
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("_scale_inv"):
            continue
        wide = tensor.astype(np.float32)
        if (scales := tensors.get(f"{name}_scale_inv")) is not None:
            wide *= scales.astype(np.float32).repeat(BLOCK, 0).repeat(BLOCK, 1)
            wide *= 1 + np.float32(noise) * draw.standard_normal(wide.shape, np.float32)
        found[f"model.{name}"] = wide
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(found, folder / "model.safetensors")
    return folder
