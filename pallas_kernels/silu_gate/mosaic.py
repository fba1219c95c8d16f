"""`silu_gate` on Mosaic GPU: adds the parts, computes silu(gate) * up, rounds to 8 bits.

All numbers that share a scale are in the same thread block (one warpgroup): it takes a piece of
eight rows if each piece of a row has a scale, or else one whole row.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.fp8_product.quantise import BLOCK, E4M3
from pallas_kernels.fp8_product.rounded import RoundedRows, Rounding
from pallas_kernels.fp8_product.rounding import (
    PIECES,
    eight_rows,
    piece_of_inputs,
    type_of_scales,
    write_eight,
    write_one,
)
from pallas_kernels.fp8_product.row_tiles import EIGHT, RowTiles, TilesOfRoundedRows
from pallas_kernels.jax_internals import pl, plgpu
from pallas_kernels.kept import kept
from pallas_kernels.refusal import require
from pallas_kernels.tiles import THREADS, Shapes, load, named, strided

ACTIVATIONS = jnp.dtype(jnp.bfloat16)
NUMBERS_OF_THREAD = 16
"""Numbers of a row that a thread computes at a time."""


def silu_gate(
    gate_up: Float[Array, "parts *tokens twice_inner"],
    *,
    dtype: DTypeLike,
    rounding: Rounding,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> RoundedRows:
    check(gate_up, dtype=dtype, rounding=rounding)
    numbers, scales = gated(gate_up, rounding=rounding, interpret=interpret)
    return RoundedRows(numbers, scales, jnp.dtype(dtype))


def check(
    gate_up: Float[Shapes, "parts *tokens twice_inner"], *, dtype: DTypeLike, rounding: Rounding
) -> None:
    """Raises `NotForThisKernel` if the kernel cannot do this call."""
    del rounding
    found, inner = jnp.dtype(dtype), gate_up.shape[-1] // 2
    require(found == ACTIVATIONS, f"activations in {found}", ACTIVATIONS.name)
    require(gate_up.dtype in (found, jnp.float32), f"parts in {gate_up.dtype}", "float32")
    require(math.prod(gate_up.shape[1:-1]) > 0, "no tokens", "at least one")
    require(inner % BLOCK == 0, f"inner size {inner}", f"a multiple of {BLOCK}")


@kept(static_argnames=("rounding", "interpret"))
def gated(
    gate_up: Float[Array, "parts *tokens twice_inner"],
    *,
    rounding: Rounding,
    interpret: plgpu.InterpretGPUParams | None,
) -> tuple[Float[Array, "*tokens inner"], Float[Array, "row_tiles pieces size"]]:
    parts, *tokens, twice_inner = gate_up.shape
    rows, inner = math.prod(tokens), twice_inner // 2
    tiles, step = TilesOfRoundedRows(rows), EIGHT if rounding == "pieces" else 1
    filled = -(-rows // step) * step
    grid = {"row": rows} if step == 1 else {"eight": filled // EIGHT, "piece": inner // BLOCK}
    numbers, scales = plgpu.kernel(
        named("silu_gate", functools.partial(one_row if step == 1 else eight, tiles)),
        out_type=(
            jax.ShapeDtypeStruct((filled, inner), E4M3),
            type_of_scales(rows, inner, rounding),
        ),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(jnp.pad(gate_up.reshape(parts, rows, -1), ((0, 0), (0, filled - rows), (0, 0))))
    return numbers[:rows].reshape(*tokens, inner), scales


def eight(tiles: RowTiles, gate_up, numbers, scales) -> None:
    """Rounds one piece of eight rows."""
    gate, up = (
        total(gate_up, (eight_rows(), piece_of_inputs(first)), PIECES)
        for first in (0, numbers.shape[1])
    )
    write_eight(tiles, silu(gate, up).astype(jnp.float32), numbers, scales)


def one_row(tiles: RowTiles, gate_up, numbers, scales) -> None:
    """Rounds one row. All of it stays in registers, in 16 bits, until its largest magnitude is
    known; it is computed in shares, because in 32 bits it would need too many registers."""
    row, inner = lax.axis_index("row"), numbers.shape[1]
    size = share_of_row(inner)
    layout, made, places = strided(size, ACTIVATIONS), [], []
    for first in range(0, inner, size):
        gate, up = (total(gate_up, (row, pl.ds(at, size)), layout) for at in (first, inner + first))
        made.append(silu(gate, up))
        places.append(numbers.at[row, pl.ds(first, size)])
    write_one(tiles, row, made, places, scales)


def share_of_row(inner: int) -> int:
    """The size of the largest equal shares of a row of which a thread has at most
    `NUMBERS_OF_THREAD`."""
    most, shares = THREADS * NUMBERS_OF_THREAD, range(1, inner // THREADS + 1)
    return next(inner // n for n in shares if inner % (n * THREADS) == 0 and inner // n <= most)


def total(gate_up, place: tuple, layout) -> Any:
    """The sum of all parts at this place, rounded as an unsplit product would be."""
    parts = [load(gate_up.at[part, *place], layout) for part in range(gate_up.shape[0])]
    wide = [part.astype(jnp.float32) for part in parts]
    return sum(wide[1:], wide[0]).astype(ACTIVATIONS).astype(jnp.float32)


def silu(gate, up) -> Any:
    return (gate / (1.0 + jnp.exp(-gate)) * up).astype(ACTIVATIONS)
