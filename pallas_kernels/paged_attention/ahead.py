"""Reads matrices from memory beside attention, so that they are in the L2 cache when the next
kernel wants them."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.jax_internals import pl, plgpu

ROWS, ROW_BYTES = 64, 128
"""A piece: 8 kB."""
STAGES = 3
KB_PER_BLOCK = 128
GATE_UP = True


@dataclasses.dataclass(frozen=True)
class Part:
    rows: int
    columns: int
    dtype: Any
    inputs_first: bool
    halves: bool
    most: int
    """Pieces"""

    @property
    def piece(self) -> tuple[int, int]:
        return ROWS, ROW_BYTES // jnp.dtype(self.dtype).itemsize

    @property
    def counts(self):
        return self.rows // self.piece[0], self.columns // self.piece[1]

    @property
    def inputs_outputs(self):
        return self.counts if self.inputs_first else self.counts[::-1]

    @property
    def pieces(self) -> int:
        inputs, outputs = self.inputs_outputs
        return min(inputs, self.most // outputs) * outputs

    def at(self, piece):
        inputs, outputs = self.inputs_outputs
        turn, output = lax.div(piece, outputs), lax.rem(piece, outputs)
        if self.halves:
            turn = lax.rem(turn, 2) * (inputs // 2) + lax.div(turn, 2)
        place = (turn, output) if self.inputs_first else (output, turn)
        return tuple(pl.ds(i * n, n) for i, n in zip(place, self.piece))


@dataclasses.dataclass(frozen=True)
class Ahead:
    parts: tuple[Part, ...]
    blocks: int
    stages: int

    def scratch(self) -> dict[str, Any]:
        one = self.parts[0]
        return {
            "ahead_piece": plgpu.SMEM(one.piece, one.dtype),
            "ahead_bar": plgpu.Barrier(num_arrivals=1, num_barriers=self.stages),
        }


def ahead_of(matrices: Any, blocks: int) -> Ahead | None:
    if not matrices or blocks > 132 or KB_PER_BLOCK == 0:
        return None
    left, parts = blocks * KB_PER_BLOCK // 8, []
    for i, matrix in enumerate(matrices):
        if i and not GATE_UP:
            break
        bits16 = jnp.dtype(matrix.dtype).itemsize == 2
        part = Part(*matrix.shape, matrix.dtype, bits16, i == 0, left)
        left -= part.pieces
        parts.append(part)
    return Ahead(tuple(parts), blocks, STAGES)


def read(ahead: Ahead, matrices, scratch: dict[str, Any], block) -> None:
    """Reads this thread block's pieces."""
    stages, before = ahead.stages, jnp.int32(0)

    def wait(step) -> None:
        plgpu.barrier_wait(scratch["ahead_bar"].at[lax.rem(step, stages)])

    for part, matrix in zip(ahead.parts, matrices):
        steps = lax.div(part.pieces - block + (ahead.blocks - 1), ahead.blocks)

        @pl.loop(0, steps)
        def _(step):
            overall = before + step
            pl.when(overall >= stages)(lambda: wait(overall - stages))
            source = matrix.at[part.at(block + step * ahead.blocks)]
            target, bar = scratch["ahead_piece"], scratch["ahead_bar"].at[lax.rem(overall, stages)]
            plgpu.copy_gmem_to_smem(source, target, bar)

        before = before + steps
    pl.loop(jnp.maximum(before - stages, 0), before)(wait)
