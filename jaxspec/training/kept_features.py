"""Target features that are computed once and kept on disk, for runs of many epochs.

features.npy   the features, by far the larger file, mapped into memory while training
labels.npz     the labels, and a hash of what both files were made from
"""

import dataclasses
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int
from tqdm import tqdm

from jaxspec.errors import LoadError, UsageError, one_line
from jaxspec.models.parameters import Params
from jaxspec.training.data import Sequences
from jaxspec.training.fingerprints import hash_of_arrays, hash_of_json
from jaxspec.training.kept_rows import Unusable, check_kept_ids, load_arrays, save_arrays
from jaxspec.training.notices import notice
from jaxspec.training.objective import DrafterObjective, in_dtype, to_device
from jaxspec.training.whole_files import written_whole

FEATURES, LABELS = "features.npy", "labels.npz"


def with_kept_features(
    objective: DrafterObjective,
    target_params: Params,
    sequences: Sequences,
    batch_size: int,
    folder: Path,
    made_of: str = "",
) -> Sequences:
    """The sequences with features and labels from `folder`. These are computed first if they are
    missing, damaged, or of other sequences. `made_of` is a hash of everything else that they
    depend on."""
    if objective.needs_distributions:
        distills = objective.recipe.labels == "distill"
        learning, instead = (
            ("distillation", "take other labels")
            if distills
            else ("DSpark", "give --dspark-weights 1 0 0, which learns from labels alone")
        )
        raise UsageError(
            f"{learning} needs the target's logits, which are too large to keep; leave out "
            f"--keep-features or {instead}"
        )
    made_of = hash_of_json([made_of, hash_of_arrays(sequences.tokens, sequences.first)])
    if (folder / LABELS).exists():
        try:
            return load_features(objective, sequences, folder, made_of)
        except Unusable as error:
            notice(f"{folder} {error}; the features are computed again")
            # Removed first: if this file exists, the features beside it are complete.
            (folder / LABELS).unlink()
    folder.mkdir(parents=True, exist_ok=True)
    labels = compute_features(objective, target_params, sequences, batch_size, folder / FEATURES)
    save_arrays(folder / LABELS, made_of, labels=labels)
    return load_features(objective, sequences, folder, made_of)


def load_features(
    objective: DrafterObjective, sequences: Sequences, folder: Path, made_of: str
) -> Sequences:
    (labels,) = load_arrays(folder / LABELS, made_of, {"labels": sequences.tokens.shape})
    check_kept_ids(labels, objective.target.config.vocab_size)
    try:
        features = np.load(folder / FEATURES, mmap_mode="r")
    except FileNotFoundError as error:
        raise Unusable(f"has no {FEATURES}") from error
    except (OSError, MemoryError) as error:
        raise LoadError(f"cannot read {folder / FEATURES}: {one_line(error)}") from error
    except Exception as error:  # numpy raises several kinds for a damaged header
        raise Unusable(f"is damaged ({FEATURES}: {one_line(error)[:100]})") from error
    shape = features_shape(objective, *sequences.tokens.shape)
    if features.shape != shape or features.dtype != stored_bits(objective):
        raise Unusable(f"is damaged ({FEATURES} has shape {features.shape}, expected {shape})")
    features = features.view(jnp.dtype(objective.compute))
    return dataclasses.replace(sequences, features=features, labels=labels)


def compute_features(
    objective: DrafterObjective,
    target_params: Params,
    sequences: Sequences,
    batch_size: int,
    path: Path,
) -> Int[np.ndarray, "sequences length"]:
    """Writes the features of all sequences to `path`, and returns the labels."""
    target_params = in_dtype(target_params, objective.compute)
    outputs = jax.jit(lambda params, batch: objective.target_outputs(params, batch)[:2])
    count, length = sequences.tokens.shape
    labels = np.zeros((count, length), np.int32)
    with written_whole(path) as unfinished:
        features = features_file(unfinished, objective, count, length)
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
    return labels


def features_shape(objective: DrafterObjective, count: int, length: int) -> tuple[int, int, int]:
    config = objective.drafter.config
    return count, length, len(config.target_layer_ids) * config.decoder.hidden_size


def stored_bits(objective: DrafterObjective) -> np.dtype:
    """Integers of the same size, in which the bits are stored, because numpy's format does not know
    bfloat16."""
    return np.dtype(f"uint{8 * jnp.dtype(objective.compute).itemsize}")


def features_file(path: Path, objective: DrafterObjective, count: int, length: int) -> np.memmap:
    """A file for the features of `count` sequences, mapped into memory."""
    shape, bits = features_shape(objective, count, length), stored_bits(objective)
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
