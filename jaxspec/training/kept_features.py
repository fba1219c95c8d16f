"""Target features computed once and kept on disk, for runs of many epochs."""

import dataclasses
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jaxspec.errors import UsageError
from jaxspec.models.parameters import Params
from jaxspec.training.data import Rows
from jaxspec.training.objective import DrafterObjective, in_dtype


def with_kept_features(
    objective: DrafterObjective, target_params: Params, rows: Rows, batch_size: int, folder: Path
) -> Rows:
    """The rows with features and labels read from `folder`, made first if they are not there."""
    if objective.recipe.labels == "distill":
        raise UsageError(
            "distillation needs the target's logits, which are too large to keep; leave out "
            "--keep-features or take other labels"
        )
    if not (folder / "labels.npy").exists():
        folder.mkdir(parents=True, exist_ok=True)
        compute(objective, target_params, rows, batch_size, folder)
    features = np.load(folder / "features.npy", mmap_mode="r").view(jnp.dtype(objective.compute))
    return dataclasses.replace(rows, features=features, labels=np.load(folder / "labels.npy"))


def compute(
    objective: DrafterObjective, target_params: Params, rows: Rows, batch_size: int, folder: Path
) -> None:
    target_params = in_dtype(target_params, objective.compute)
    heard = jax.jit(lambda params, batch: objective.heard(params, batch)[:2])
    count, length = rows.tokens.shape
    width = (
        len(objective.drafter.config.target_layer_ids)
        * objective.drafter.config.decoder.hidden_size
    )
    # numpy's format does not know bfloat16: the bits are stored as integers of the same size.
    bits = np.dtype(f"uint{8 * jnp.dtype(objective.compute).itemsize}")
    features = np.lib.format.open_memmap(
        folder / "features.npy", mode="w+", dtype=bits, shape=(count, length, width)
    )
    reserve(folder / "features.npy")
    labels = np.zeros((count, length), np.int32)
    for start in tqdm(range(0, count, batch_size), desc="features", unit="batch", disable=None):
        places = np.arange(start, start + batch_size) % count
        batch = jax.tree.map(jnp.asarray, rows.batch(places))
        some, wanted = jax.tree.map(np.asarray, heard(target_params, batch))
        kept = min(batch_size, count - start)
        features[places[:kept]] = some[:kept].view(bits)
        labels[places[:kept]] = wanted[:kept]
    features.flush()
    # Last, since its being there says that both are whole.
    np.save(folder / "labels.npy", labels)


def reserve(path: Path) -> None:
    """All bytes of a file at once: a full disk under a memory map ends the process by a signal."""
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
