"""Inputs of steps as few arrays. Every array that is uploaded takes the host about 0.1 ms, while
other requests wait for their next step.

    integers of a chunk       slot  start  count  known     tokens...  following...
    integers of an admission  slot  length limit  top_k seed  pages...   tokens...
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.engine.step.io import Admission, PromptChunk
from jaxspec.sampling import SlotSampling

CHUNK_COLUMNS, ADMISSION_COLUMNS = 4, 5
"""Integers of a row before those of which there are several."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedChunk:
    """A `PromptChunk`."""

    integers: Int[Array, "batch columns"]
    """A row per request."""
    width: int = dataclasses.field(metadata={"static": True})
    """Tokens of each chunk. Rows that are longer have the tokens that follow, too."""

    @property
    def chunk(self) -> PromptChunk:
        slots, starts, counts, known = self.integers[:, :CHUNK_COLUMNS].T
        tokens, following = _split(self.integers[:, CHUNK_COLUMNS:], self.width)
        return PromptChunk(slots, tokens, starts, counts, known, following)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedAdmission:
    """An `Admission`."""

    integers: Int[Array, "batch columns"]
    """A row per request."""
    fractions: Float[Array, "batch entries"]
    """Temperature, top_p and min_p of every request."""
    max_pages: int = dataclasses.field(metadata={"static": True})
    """Pages of each request. Rows that are longer have the tokens in these pages, too."""

    @property
    def admission(self) -> Admission:
        slots, lengths, limits, top_k, seed = self.integers[:, :ADMISSION_COLUMNS].T
        temperature, top_p, min_p = self.fractions.T
        pages, tokens = _split(self.integers[:, ADMISSION_COLUMNS:], self.max_pages)
        sampling = SlotSampling(temperature, top_k, top_p, min_p, seed.astype(jnp.uint32))
        return Admission(slots, pages, lengths, limits, sampling, tokens)


def packed_chunk(chunk: PromptChunk) -> PackedChunk:
    known = jnp.full_like(chunk.slots, -1) if chunk.known is None else chunk.known
    columns = jnp.stack([chunk.slots, chunk.starts, chunk.counts, known], axis=1)
    several = [chunk.tokens] if chunk.following is None else [chunk.tokens, chunk.following]
    return PackedChunk(jnp.concatenate([columns, *several], axis=1), chunk.tokens.shape[1])


def packed_admission(admission: Admission) -> PackedAdmission:
    sampling, pages = admission.sampling, admission.pages
    seed = sampling.seed.astype(jnp.int32)
    integers = admission.slots, admission.lengths, admission.limits, sampling.top_k, seed
    several = [pages] if admission.tokens is None else [pages, admission.tokens]
    rows = jnp.concatenate([jnp.stack(integers, axis=1), *several], axis=1)
    fractions = jnp.stack([sampling.temperature, sampling.top_p, sampling.min_p], axis=1)
    return PackedAdmission(rows, fractions, pages.shape[1])


def _split(
    columns: Int[Array, "batch columns"], first: int
) -> tuple[Int[Array, "batch {first}"], Int[Array, "batch entries"] | None]:
    """The first columns, and the others if there are any."""
    return columns[:, :first], columns[:, first:] if columns.shape[1] > first else None
