"""What a step that reads prompts was given, with arrays of the host."""

import dataclasses

import numpy as np
from jaxtyping import Int

from jaxspec.engine.step.packed import CHUNK_COLUMNS, PackedChunk

PerRequest = Int[np.ndarray, " batch"]
PerToken = Int[np.ndarray, "batch width"]


@dataclasses.dataclass(frozen=True)
class Chunk:
    """The fields of a `PromptChunk`."""

    slots: PerRequest
    tokens: PerToken
    starts: PerRequest
    counts: PerRequest
    known: PerRequest
    following: PerToken | None


def chunk_of(packed: PackedChunk) -> Chunk:
    """What `PackedChunk.chunk` is on the device, without running anything there."""
    rows = np.asarray(packed.integers)
    slots, starts, counts, known = rows[:, :CHUNK_COLUMNS].T
    tokens, following = np.split(rows[:, CHUNK_COLUMNS:], [packed.width], axis=1)
    return Chunk(slots, tokens, starts, counts, known, following if following.size else None)
