"""`add_norm` on Mosaic GPU: one thread block per row (token), everything in registers."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.jax_internals import plgpu
from pallas_kernels.kept import kept
from pallas_kernels.refusal import require
from pallas_kernels.tiles import THREADS, Shapes, load, named, strided


@kept(static_argnames=("eps", "interpret"))
def add_norm(
    x: Float[Array, "*tokens hidden"],
    addend: Float[Array, "parts *tokens hidden"],
    scale: Float[Array, " hidden"],
    *,
    eps: float,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Float[Array, "*tokens hidden"], Float[Array, "*tokens hidden"]]:
    check(x, addend, scale, eps=eps)
    hidden, rows = x.shape[-1], math.prod(x.shape[:-1])
    flat = jax.ShapeDtypeStruct((rows, hidden), x.dtype)
    outputs = plgpu.kernel(
        named("add_norm", functools.partial(one_row, eps)),
        out_type=(flat, flat),
        grid=(rows,),
        grid_names=("row",),
        num_threads=1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(x.reshape(flat.shape), addend.reshape(-1, *flat.shape), scale)
    return tuple(out.reshape(x.shape) for out in outputs)


def check(
    x: Float[Shapes, "*tokens hidden"],
    addend: Float[Shapes, "parts *tokens hidden"],
    scale: Float[Shapes, " hidden"],
    *,
    eps: float,
) -> None:
    """Raises `NotForThisKernel` if the kernel cannot do this call."""
    hidden = x.shape[-1]
    require(
        addend.dtype in (x.dtype, jnp.float32),
        f"an addend in {addend.dtype}",
        f"float32 or the dtype of x, {x.dtype}",
    )
    require(hidden % THREADS == 0, f"hidden size {hidden}", f"a multiple of {THREADS}")


def one_row(eps: float, x, addend, scale, total, normed) -> None:
    row, layout = lax.axis_index("row"), strided(x.shape[1], x.dtype)
    parts = [
        load(addend.at[part, row], layout).astype(jnp.float32) for part in range(addend.shape[0])
    ]
    product = sum(parts[1:], parts[0])
    add_and_norm(eps, x.at[row], product, scale, total.at[row], normed.at[row])


def add_and_norm(eps: float, x, product, scale, total, normed) -> None:
    """Adds a product in float32 to one row, and norms it."""
    hidden = x.shape[0]
    layout = strided(hidden, x.dtype)
    scales = load(scale, layout).astype(jnp.float32)
    product = product.astype(x.dtype).astype(jnp.float32)
    added = (load(x, layout).astype(jnp.float32) + product).astype(x.dtype)
    total[...] = added
    wide = added.astype(jnp.float32)
    inverse = lax.rsqrt((wide * wide).sum() * (1.0 / hidden) + eps)
    normed[...] = (wide * inverse * scales).astype(x.dtype)
