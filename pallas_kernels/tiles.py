"""Helpers of all kernels: shared memory, register layouts, loads, stores, products and fences."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import jax_internals as internals
from pallas_kernels.jax_internals import (
    Accumulator,
    float32_type,
    inline_mgpu,
    pl,
    plgpu,
    ptx,
    swizzle,
    tiling,
)

Shapes = jax.Array | jax.ShapeDtypeStruct
"""An array of which only shape and dtype are read."""
THREADS = 128
"""Threads of a warpgroup."""
SHARED_BYTES = 224 * 1024
"""Shared memory of a thread block on Hopper (227 kB), less 3 kB for barriers and alignment."""
BYTES_PER_LOAD = 16
LANES_PER_ROW = 16
"""Lanes of a warp that hold one row in the layout of `rows_in_lanes`."""


def swizzled(shape: tuple[int, ...], dtype, bytes_per_row: int = 128):
    """Swizzled shared memory, without bank conflicts for matrix instructions and bulk copies."""
    bits = jnp.dtype(dtype).itemsize * 8
    columns = min(shape[-1], 8 * bytes_per_row // bits)
    return plgpu.SMEM(
        shape,
        dtype,
        transforms=(
            tiling((8, columns)),
            swizzle(columns * bits // 8),
        ),
    )


def unswizzled(shape: tuple[int, ...], dtype, tile: tuple[int, int]):
    """Shared memory from which bulk copies take `tile[0]` rows each. Without an explicit tiling the
    compiler would swizzle it in tiles of few rows, which bulk copies then read in another order
    than they were written. It does not swizzle single rows of at most 128 bytes, and cannot tile
    them."""
    short = tile[0] == 1 and shape[-1] * jnp.dtype(dtype).itemsize <= 128
    return plgpu.SMEM(shape, dtype, transforms=() if short else (tiling(tile),))


def rows_in_lanes(columns: int):
    """Layout of [8 * n, columns]: each row in 16 lanes, two of every eight rows in each warp."""
    return plgpu.Layout.TILED(
        plgpu.Tiling(((8, columns), (2, columns), (columns // LANES_PER_ROW,))),
        warp_dims=(-5,),
        lane_dims=(-3, -2),
        vector_dim=-1,
    )


def strided(size: int, dtype):
    """Layout of one row for coalesced loads: each load of a thread takes up to 16 bytes."""
    most = BYTES_PER_LOAD // jnp.dtype(dtype).itemsize
    return plgpu.Layout.WG_STRIDED((size,), vec_size=math.gcd(size // THREADS, most))


def load(ref, layout):
    """Loads into registers, even if that causes bank conflicts."""
    return plgpu.load(ref, layout=layout, optimized=False)


def times(acc, left, right_ref, interpreted: bool):
    """`acc + left @ right`, with `left` in registers and `right` in shared memory."""
    if interpreted:
        acc = acc + jnp.dot(left, right_ref[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()
        return acc
    multiply = pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, left, right_ref))
    return multiply(Accumulator.init(acc))


class Turn(NamedTuple):
    """Lets the warpgroups of a thread block give their products to the tensor core one after the
    other. While the products of one run, the others prepare their next ones."""

    barriers: Any
    """One for each warpgroup, at which it waits for its turn."""
    own: Any
    """Index of this warpgroup."""
    warpgroups: int
    """How many warpgroups take turns."""

    def take(self) -> None:
        plgpu.barrier_wait(self.barriers.at[self.own])

    def pass_on(self) -> None:
        plgpu.barrier_arrive(self.barriers.at[lax.rem(self.own + 1, self.warpgroups)])

    def begin(self) -> None:
        """The last warpgroup begins, by giving the first one its turn."""
        pl.when(self.own == self.warpgroups - 1)(self.pass_on)

    def end(self) -> None:
        """The first warpgroup takes the last turn that was passed on, so that none is left over."""
        pl.when(self.own == 0)(self.take)


def times_each(acc, pieces, interpreted: bool, turn: Turn | None = None):
    """`acc` plus the products of `pieces`. A piece is a function that brings the left side into
    registers, and a right side in shared memory. A left side is brought while the product before it
    runs or, if warpgroups take turns, while the products of the others run."""
    if turn is not None:
        brought = [(left(), right_ref) for left, right_ref in pieces]
        pieces = [(lambda left=left: left, right_ref) for left, right_ref in brought]
        turn.take()
    pass_on = (lambda: None) if turn is None else turn.pass_on
    if interpreted:
        for left, right_ref in pieces:
            acc = times(acc, left(), right_ref, interpreted)
        pass_on()
        return acc

    def multiply(acc_ref) -> None:
        for left, right_ref in pieces:
            plgpu.wgmma(acc_ref, left(), right_ref)
        pass_on()

    return pl.run_state(multiply)(Accumulator.init(acc))


def rounded_sum(a, b, layout, interpreted: bool):
    """`a + b` in float32, for products that must be rounded before they are added. The compiler may
    fuse a plain `+` with the product before it, which is then not rounded, and whether it does so
    may depend on the number of rows."""
    if interpreted:
        return a + b
    return each(instruction("add.rn.f32 $0, $1, $2;"), layout, a, b)


def instruction(text: str) -> Callable[..., Any]:
    return lambda *numbers: ptx(text, *numbers, result_types=float32_type())


def each(compute: Callable[..., Any], layout, *arrays):
    """Applies a function to the numbers of float32 arrays, one from each array at a time."""

    @inline_mgpu(
        arg_types=(layout,) * len(arrays),
        return_type=plgpu.ShapeDtypeStruct(arrays[0].shape, jnp.dtype(jnp.float32), layout=layout),
    )
    def of_all(_, *arrays):
        found = [compute(*numbers) for numbers in zip(*map(internals.floats_of, arrays))]
        return internals.array_of(found, arrays[0].shape, layout)[0]

    return of_all(*arrays)


def wait_for_warpgroup(interpreted: bool) -> None:
    """Waits until all threads of this warpgroup are here. The interpreter runs them together."""
    if not interpreted:
        inline_mgpu()(lambda _: internals.wait_for_warpgroup())()


def fence_cluster(interpreted: bool) -> None:
    """Orders this thread's loads and stores of global memory as the other thread blocks of the
    cluster see them. A barrier in shared memory does not order them."""
    if not interpreted:
        inline_mgpu()(lambda _: ptx("fence.acq_rel.cluster;"))()


def fence_async() -> None:
    """Orders this thread's loads and stores of global memory before later bulk copies of it."""
    inline_mgpu()(lambda _: ptx("fence.proxy.async.global;"))()


def named(name: str, body):
    """The same kernel body under this name, which profiles show."""

    def kernel(*refs, **scratch):
        body(*refs, **scratch)

    kernel.__name__ = name
    return kernel
