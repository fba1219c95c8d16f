"""The target's token ids that a drafter with a reduced vocabulary can draft.

Speculators stores them as two tensors:

d2t[draft id] = target id - draft id          t2d[target id] = whether it was kept
"""

import numpy as np
from jaxtyping import Bool, Int

from jaxspec.errors import LoadError

Ids = Int[np.ndarray, " draft_vocab"]


def target_ids_of(
    offsets: Ids, kept: Bool[np.ndarray, " vocab"] | None, vocab_size: int, where: str
) -> Ids:
    """The target id of each draft id; checks that the ids are distinct, in range and kept."""
    ids = np.arange(len(offsets)) + offsets.astype(np.int64)
    check_ids(ids, vocab_size, where)
    if kept is not None and not np.array_equal(np.flatnonzero(kept), np.sort(ids)):
        raise LoadError(
            f"{where}: t2d and d2t keep different ids, expected the same; use an undamaged "
            "checkpoint"
        )
    return ids.astype(np.int32)


def check_ids(ids: Ids, vocab_size: int, where: str) -> None:
    """Raises a LoadError if an id is outside the target's vocabulary, or is there twice."""
    if ids.min() < 0 or ids.max() >= vocab_size or len(np.unique(ids)) != len(ids):
        raise LoadError(
            f"{where}: d2t leads to ids {ids.min()} to {ids.max()}, expected offsets to distinct "
            f"ids below {vocab_size}; use an undamaged checkpoint"
        )
