"""Target features that are computed once and kept on disk, for runs of many epochs."""

import dataclasses
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jaxspec.errors import UsageError
from jaxspec.models.parameters import Params
from jaxspec.training.data import Sequences
from jaxspec.training.objective import DrafterObjective, in_dtype, to_device


def with_kept_features(
    objective: DrafterObjective,
    target_params: Params,
    sequences: Sequences,
    batch_size: int,
    folder: Path,
) -> Sequences:
    """The sequences with features and labels from `folder`, computed first if they are missing."""
    if objective.recipe.labels == "distill":
        raise UsageError(
            "distillation needs the target's logits, which are too large to keep; leave out "
            "--keep-features or take other labels"
        )
    if not (folder / "labels.npy").exists():
        folder.mkdir(parents=True, exist_ok=True)
        compute_features(objective, target_params, sequences, batch_size, folder)
    features = np.load(folder / "features.npy", mmap_mode="r").view(jnp.dtype(objective.compute))
    labels = np.load(folder / "labels.npy")
    return dataclasses.replace(sequences, features=features, labels=labels)


def compute_features(
    objective: DrafterObjective,
    target_params: Params,
    sequences: Sequences,
    batch_size: int,
    folder: Path,
) -> None:
    """Writes features.npy and labels.npy."""
    target_params = in_dtype(target_params, objective.compute)
    outputs = jax.jit(lambda params, batch: objective.target_outputs(params, batch)[:2])
    count, length = sequences.tokens.shape
    features = features_file(folder / "features.npy", objective, count, length)
    labels = np.zeros((count, length), np.int32)
    for start in tqdm(range(0, count, batch_size), desc="features", unit="batch", disable=None):
        # The last batch is filled up with sequences from the start, so that all have one shape.
        indices = np.arange(start, start + batch_size) % count
        batch = to_device(sequences.take(indices))
        batch_features, batch_labels = jax.tree.map(np.asarray, outputs(target_params, batch))
        part = slice(start, min(start + batch_size, count))
        kept = part.stop - part.start
        features[part] = batch_features[:kept].view(features.dtype)
        labels[part] = batch_labels[:kept]
    features.flush()
    # Written last: if this file exists, both are complete.
    np.save(folder / "labels.npy", labels)


def features_file(path: Path, objective: DrafterObjective, count: int, length: int) -> np.memmap:
    """A file for the features of `count` sequences, mapped into memory.

    numpy's format does not know bfloat16, so the bits are stored as integers of the same size.
    """
    config = objective.drafter.config
    width = len(config.target_layer_ids) * config.decoder.hidden_size
    bits = np.dtype(f"uint{8 * jnp.dtype(objective.compute).itemsize}")
    shape = (count, length, width)
    features = np.lib.format.open_memmap(path, mode="w+", dtype=bits, shape=shape)
    reserve(path)
    return features


def reserve(path: Path) -> None:
    """Allocates all bytes of a file now.

    If the disk were full later, writing through the memory map would end the process by a signal.
    """
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
