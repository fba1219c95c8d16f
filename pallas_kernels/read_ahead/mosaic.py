"""Reads a matrix from memory, so that it is in the L2 cache when the next kernel wants it.

It runs beside other kernels that leave the memory idle, such as attention over few requests: a
command buffer runs kernels at the same time if neither reads what the other writes.

    kernels    dense_chain ##### qkv_write # attention ###### dense_chain ##########
    beside                       read_ahead ######
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.jax_internals import pl, plgpu
from pallas_kernels.kept import kept
from pallas_kernels.tiles import named

ROWS, ROW_BYTES = 64, 256
"""A piece that is read at once: 16 kB."""
STAGES = 3
"""Pieces that a thread block has asked for at a time."""
BLOCKS = 66
MOST_BYTES = 20 * 1024**2
"""More might drive other things out of the L2 cache."""


@kept(static_argnames=("blocks", "stages", "most_bytes"))
def read_ahead(
    matrix: Float[Array, "rows columns"],
    after: Array,
    *,
    blocks: int = BLOCKS,
    stages: int = STAGES,
    most_bytes: int = MOST_BYTES,
) -> Int[Array, "1"]:
    """Reads the matrix, or its first rows, after `after` has been computed. The result has no
    meaning; a kernel that takes it begins after everything has been read."""
    columns = ROW_BYTES // matrix.dtype.itemsize
    across = matrix.shape[1] // columns
    down = min(matrix.shape[0] // ROWS, max(most_bytes // (ROWS * ROW_BYTES * across), 1))
    token = plgpu.kernel(
        named("read_ahead", functools.partial(read, down * across, across, blocks, stages)),
        out_type=(jax.ShapeDtypeStruct((1,), jnp.int32),),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=1,
        thread_name="warpgroup",
        scratch_types={
            "pieces": plgpu.SMEM((stages, ROWS, columns), matrix.dtype),
            "arrived": plgpu.Barrier(num_arrivals=1, num_barriers=stages),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(matrix, after)
    return token[0]


def read(number: int, across: int, blocks: int, stages: int, matrix, after, token, **scratch: Any):
    block = lax.axis_index("block")
    columns = scratch["pieces"].shape[2]
    steps = lax.div(number - block + (blocks - 1), blocks)

    def wait(step) -> None:
        plgpu.barrier_wait(scratch["arrived"].at[lax.rem(step, stages)])

    @pl.loop(0, math.ceil(number / blocks))
    def _(step):
        @pl.when(step < steps)
        def _():
            pl.when(step >= stages)(lambda: wait(step - stages))
            piece = block + step * blocks
            # A pair shares the inputs, which are rows in 16 bits: part of each half, not one half.
            turn, tall = lax.div(piece, across), matrix.shape[0] // ROWS
            down = lax.rem(turn, 2) * (tall // 2) + lax.div(turn, 2)
            rows = pl.ds(down * ROWS, ROWS)
            place = pl.ds(lax.rem(piece, across) * columns, columns)
            stage = lax.rem(step, stages)
            target, arrived = scratch["pieces"].at[stage], scratch["arrived"].at[stage]
            plgpu.copy_gmem_to_smem(matrix.at[rows, place], target, arrived)

    pl.loop(jnp.maximum(steps - stages, 0), steps)(wait)
