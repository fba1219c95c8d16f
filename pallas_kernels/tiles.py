"""What the kernels share: tiles, layouts, loads, and the product that the interpreter lacks."""

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.utils import inline_ptx
from jax.experimental.pallas import mosaic_gpu as plgpu

# jax imports it there without listing it.
Accumulator = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
"""Registers that a matrix instruction adds to."""
THREADS = 128
"""Of a warpgroup."""
SHARED_BYTES = 224 * 1024
"""What a thread block can have on Hopper, less the 3 kB of barriers and rounding."""
LANES_PER_ROW = 16
"""Of `rows_in_lanes`."""


def swizzled(shape: tuple[int, ...], dtype):
    """Shared memory that matrix instructions and bulk copies read without bank conflicts."""
    bits = jnp.dtype(dtype).itemsize * 8
    columns = min(shape[-1], 1024 // bits)
    return plgpu.SMEM(
        shape,
        dtype,
        transforms=(
            tiling((8, columns)),
            plgpu.SwizzleTransform(columns * bits // 8),  # pyright: ignore[reportAbstractUsage]
        ),
    )


def unswizzled(shape: tuple[int, ...], dtype, tile: tuple[int, int]):
    """Shared memory that bulk copies of some rows read. Left to itself the compiler would swizzle
    it in tiles of few rows, and reads and writes then disagree about them. Single rows of at most
    128 bytes it leaves alone, and cannot lay out as tiles."""
    short = tile[0] == 1 and shape[-1] * jnp.dtype(dtype).itemsize <= 128
    return plgpu.SMEM(shape, dtype, transforms=() if short else (tiling(tile),))


def tiling(tile: tuple[int, ...]):
    # jax leaves a method of the transform abstract that only its other users need.
    return plgpu.TilingTransform(tile)  # pyright: ignore[reportAbstractUsage]


def inline_mgpu(arg_types: tuple = (), return_type: Any = None) -> Any:
    """jax's decorator of this name; its types ask callers for the context that it passes itself."""
    return plgpu.inline_mgpu(arg_types=arg_types, return_type=return_type)


def rows_in_lanes(columns: int):
    """[8 * n, columns]: each row in 16 lanes, each warp two rows of every eight."""
    return plgpu.Layout.TILED(
        plgpu.Tiling(((8, columns), (2, columns), (columns // LANES_PER_ROW,))),
        warp_dims=(-5,),
        lane_dims=(-3, -2),
        vector_dim=-1,
    )


def load(ref, layout):
    """Into registers, bank conflicts or not."""
    return plgpu.load(ref, layout=layout, optimized=False)


def store(ref, value) -> None:
    """From registers, whole sectors or not; jax 0.11 does not ask."""
    if jax_store := getattr(plgpu, "store", None):
        jax_store(ref, value, optimized=False)
    else:
        ref[...] = value


def times(acc, left, right_ref, interpreted: bool):
    """acc + left @ right, left in registers, right in shared memory."""
    if interpreted:
        acc = acc + jnp.dot(left, right_ref[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()
        return acc
    multiply = pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, left, right_ref))
    return multiply(Accumulator.init(acc))


def fence_cluster(interpreted: bool) -> None:
    """Orders this thread's global loads and stores for the other blocks of the cluster, which a
    barrier in shared memory does not."""
    if not interpreted:
        inline_mgpu()(lambda _: inline_ptx("fence.acq_rel.cluster;", has_side_effects=True))()


def fence_async() -> None:
    """Orders this thread's loads and stores of global memory for bulk copies of it."""
    inline_mgpu()(lambda _: inline_ptx("fence.proxy.async.global;", has_side_effects=True))()


def require(condition: bool, expected: str) -> None:
    if not condition:
        raise NotImplementedError(f"this kernel on Mosaic GPU expects {expected}")


def named(name: str, body):
    """Gives the kernel the name that profiles show."""

    def kernel(*refs, **scratch):
        body(*refs, **scratch)

    kernel.__name__ = name
    return kernel
