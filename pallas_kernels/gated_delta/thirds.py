"""Products of rows in bfloat16 with a matrix in float32, on the tensor core.

A float32 number is the sum of three bfloat16 numbers, each of which takes eight of its bits. A
product of two bfloat16 numbers is exact in float32, so nothing is rounded before products are added
up. Matrix instructions take two neighbouring inputs of an output in one register. In shared memory
the outputs are neighbours, so each thread loads its numbers one by one and pairs them.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels import jax_internals as internals
from pallas_kernels.jax_internals import float32_type, inline_mgpu, plgpu, ptx

PIECE = 16
"""Inputs of one matrix instruction."""
LEFT, RIGHT, SUMS = (
    getattr(plgpu.Layout, f"MMA_{kind}")(jnp.bfloat16, m_warps=1) for kind in ("LHS", "RHS", "ACC")
)
"""Layouts of the sides of a product and of the result, whose columns are shared out over the four
warps."""
SINGLE = plgpu.Layout.TILED(
    plgpu.Tiling(((PIECE, 32), (8, 8), (2, 1))), warp_dims=(-5,), lane_dims=(-3, -4), vector_dim=-1
)
"""The numbers that a thread has in `RIGHT`, in the same order, each in a register of its own."""
PARTS = 3


def add_product(sums, left, right, interpreted: bool) -> Any:
    """`sums + left @ right`. The interpreter has no mma."""
    if interpreted:
        return sums + jnp.dot(left, right, preferred_element_type=jnp.float32)
    return plgpu.mma(sums, left, right)


def thirds_of(numbers, interpreted: bool) -> tuple:
    """Three bfloat16 arrays whose sum these numbers are, the largest first."""
    if interpreted:
        return tuple(part.astype(jnp.bfloat16) for part in rounded_thirds(numbers))
    shape = numbers.shape
    part = plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.bfloat16), layout=RIGHT)

    @inline_mgpu(arg_types=(SINGLE,), return_type=(part,) * PARTS)
    def of_pairs(_, numbers):
        floats = internals.floats_of(numbers)
        pairs = [thirds_of_pair(*pair) for pair in zip(floats[::2], floats[1::2])]
        return tuple(internals.array_of_pairs(list(third), shape, RIGHT) for third in zip(*pairs))

    return of_pairs(numbers)


def rounded_thirds(numbers) -> list:
    parts = []
    for _ in range(PARTS):
        parts.append(lax.reduce_precision(numbers, exponent_bits=8, mantissa_bits=7))
        numbers = numbers - parts[-1]
    return parts


def thirds_of_pair(first, second) -> list:
    """Three pairs in bfloat16, as integers. The first number is in the lower half."""
    pairs = [rounded_pair(first, second)]
    while len(pairs) < PARTS:
        first = less(first, "shl.b32 half, $2, 16;", pairs[-1])
        second = less(second, "and.b32 half, $2, 0xffff0000;", pairs[-1])
        pairs.append(rounded_pair(first, second))
    return pairs


def rounded_pair(first, second) -> Any:
    text = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    return ptx(text, first, second, result_types=internals.int32_type())


def less(number, widen: str, pair) -> Any:
    """A number minus the bfloat16 that it was rounded to, the half of `pair` that `widen` takes."""
    declared = "{ .reg .b32 half; .reg .f32 wide;"
    text = f"{declared} {widen} mov.b32 wide, half; sub.rn.f32 $0, $1, wide; }}"
    return ptx(text, number, pair, result_types=float32_type())
