"""`add_norm` on Mosaic GPU: one thread block per row (token)."""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.add_norm.kernel import AT_ONCE, one_row, one_row_in_8_bits
from pallas_kernels.fp8_product.quantise import BLOCK, E4M3
from pallas_kernels.fp8_product.rounded import RoundedRows, Rounding
from pallas_kernels.fp8_product.rounding import type_of_scales
from pallas_kernels.fp8_product.row_tiles import TilesOfRoundedRows
from pallas_kernels.jax_internals import plgpu
from pallas_kernels.kept import kept
from pallas_kernels.refusal import require
from pallas_kernels.tiles import THREADS, Shapes, named


def add_norm(
    x: Float[Array, "*tokens hidden"],
    addend: Float[Array, "parts *tokens hidden"],
    scale: Float[Array, " hidden"],
    *,
    eps: float,
    rounding: Rounding | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Float[Array, "*tokens hidden"], Float[Array, "*tokens hidden"] | RoundedRows]:
    check(x, addend, scale, eps=eps, rounding=rounding)
    options = {"eps": eps, "rounding": rounding, "interpret": interpret}
    total, normed, *scales = added_and_normed(x, addend, scale, **options)
    return total, RoundedRows(normed, scales[0], x.dtype) if scales else normed


@kept(static_argnames=("eps", "rounding", "interpret"))
def added_and_normed(
    x: Float[Array, "*tokens hidden"],
    addend: Float[Array, "parts *tokens hidden"],
    scale: Float[Array, " hidden"],
    *,
    eps: float,
    rounding: Rounding | None,
    interpret: plgpu.InterpretGPUParams | None,
) -> tuple[Array, ...]:
    """The total and its norm; if the norm is rounded, also its scales."""
    hidden, rows = x.shape[-1], math.prod(x.shape[:-1])
    flat = jax.ShapeDtypeStruct((rows, hidden), x.dtype)
    body, normed, scratch = one_row, (flat,), {}
    if rounding is not None:
        in_pieces = (hidden,) if rounding == "rows" else (hidden // BLOCK, BLOCK)
        body = functools.partial(one_row_in_8_bits, TilesOfRoundedRows(rows), rounding)
        normed = (
            jax.ShapeDtypeStruct((rows, *in_pieces), E4M3),
            type_of_scales(rows, hidden, rounding),
        )
        scratch = {} if rounding == "rows" else {"whole": plgpu.SMEM(in_pieces, x.dtype)}
    total, numbers, *scales = plgpu.kernel(
        named("add_norm", functools.partial(body, eps)),
        out_type=(flat, *normed),
        grid=(rows,),
        grid_names=("row",),
        num_threads=1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(x.reshape(flat.shape), addend.reshape(-1, *flat.shape), scale)
    return total.reshape(x.shape), numbers.reshape(x.shape), *scales


def check(
    x: Float[Shapes, "*tokens hidden"],
    addend: Float[Shapes, "parts *tokens hidden"],
    scale: Float[Shapes, " hidden"],
    *,
    eps: float,
    rounding: Rounding | None = None,
) -> None:
    """Raises `NotForThisKernel` if the kernel cannot do this call."""
    hidden = x.shape[-1]
    require(
        addend.dtype in (x.dtype, jnp.float32),
        f"an addend in {addend.dtype}",
        f"float32 or the dtype of x, {x.dtype}",
    )
    require(hidden % THREADS == 0, f"hidden size {hidden}", f"a multiple of {THREADS}")
    if rounding == "pieces":
        of = AT_ONCE
        require(hidden % of == 0, f"hidden size {hidden} in pieces", f"a multiple of {of}")
