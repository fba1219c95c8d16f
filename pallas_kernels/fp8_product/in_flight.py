"""Asynchronous products of e4m3 by e4m3: a warpgroup begins them and waits before it adds them up.

In between it does work that does not need them. `plgpu.wgmma` would wait at once, and it adds to
sums, which would have to be set to zero first. Here the first instruction overwrites the sums.
"""

import functools
from typing import Literal

import jax.numpy as jnp
from jax import lax

from pallas_kernels import jax_internals as internals
from pallas_kernels.fp8_product.quantise import BLOCK
from pallas_kernels.fp8_product.widen import ACC, UNIT
from pallas_kernels.jax_internals import inline_mgpu, plgpu, ptx, swizzle, tiling

IN_FLIGHT = plgpu.Layout.TILED(
    plgpu.Tiling(((64, 8), (16, 8), (8, 8), (2,), (1,))),
    warp_dims=(-8,),
    lane_dims=(-4, -3),
    vector_dim=-1,
)
"""ACC with each number in a register of its own. If numbers were in pairs, the compiler would wait
for the tensor core to write the registers that the pairs are made from."""
CHUNK = plgpu.RefType((tiling((8, BLOCK)), swizzle(BLOCK)))
"""Rows of BLOCK numbers of 8 bits in shared memory."""

BYTES_OF_INSTRUCTION = 32
"""Inputs that one matrix instruction multiplies."""
WITH_128_BYTES_PER_ROW = 0x40000040
"""The upper half of the descriptor of a matrix in shared memory with rows of 128 bytes, swizzled:
eight rows take 1024 bytes."""


def begin_product(left, right, interpreted: bool):
    """Begins `left @ right.T`, for left numbers [UNIT, BLOCK] and right ones [any, BLOCK]."""
    if interpreted:
        sides = [ref[...].astype(jnp.float32) for ref in (left, right)]
        plgpu.commit_smem()
        return jnp.dot(sides[0], sides[1].T)
    shape = (UNIT, right.shape[0])

    @inline_mgpu(
        arg_types=(CHUNK, CHUNK),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.float32), layout=IN_FLIGHT),
    )
    def begin(_, *operands):
        of_left, of_right = map(internals.shared_address, operands)
        products = products_in_flight(shape[1], of_left, of_right, BLOCK)
        return internals.array_of(products, shape, IN_FLIGHT)[0]

    return begin(left, right)


def wait_and_add(
    sums, products, scales: tuple, along: Literal[0, 1], interpreted: bool, still_running: int = 0
):
    """Waits for the products, but not for as many later ones as are `still_running`. Returns
    `sums + products * scales`, rounded once, or `sums + products` if there are no scales.

    Scales belong to left numbers (`along` 0) or to right ones (1). If there are several arrays of
    them, each is for an equal share of the right numbers.
    """
    if interpreted:
        plgpu.commit_smem()  # the scales have been read
        if not scales:
            return sums + products
        share = (sums.shape[0], sums.shape[1] // len(scales))
        each = [lax.broadcast_in_dim(one, share, [along]) for one in scales]
        return sums + products * jnp.concatenate(each, axis=1)
    of_scales = (ACC.reduce(1 - along),) * len(scales)
    add = "fma.rn.f32 $0, $2, $3, $1;" if scales else "add.rn.f32 $0, $1, $2;"

    @inline_mgpu(
        arg_types=(ACC, IN_FLIGHT, *of_scales),
        return_type=plgpu.ShapeDtypeStruct(sums.shape, jnp.dtype(jnp.float32), layout=ACC),
    )
    def added(_, *arrays):
        ptx(f"wgmma.wait_group.sync.aligned {still_running};")
        before, new, *factors = map(internals.floats_of, arrays)
        numbers = [before, new]
        if factors:
            share = len(new) // len(factors)
            spread = functools.partial(spread_scales, count=share, along=along)
            numbers.append([one for factor in factors for one in spread(factor)])
        compute = functools.partial(ptx, add, result_types=internals.float32_type())
        found = [compute(*each) for each in zip(*numbers, strict=True)]
        return internals.array_of(found, sums.shape, ACC)[0]

    return added(sums, products, *scales)


def spread_scales(scales: list, count: int, along: Literal[0, 1]) -> list:
    """This thread's scale of each of its next `count` numbers. They come in fours: two neighbours
    of a left number, and the same two of the left number eight further on."""
    if along == 0:
        return [scales[i // 2 % 2] for i in range(count)]
    return [scales[i // 4 * 2 + i % 2] for i in range(count)]


def products_in_flight(width: int, left, right, inputs: int) -> list:
    """Begins the product of a matrix of 64 rows at the address `left` with one of `width` rows at
    the address `right`, both e4m3. Returns the floats of this thread, which are valid only after
    `wgmma.wait_group`."""
    count = width // 2
    floats = ", ".join(f"${i}" for i in range(count))
    instruction = f"wgmma.mma_async.sync.aligned.m64n{width}k{BYTES_OF_INSTRUCTION}.f32.e4m3.e4m3"
    lines = ["wgmma.fence.sync.aligned;"]
    lines += described("left", f"${count}") + described("right", f"${count + 1}")
    for first in range(0, inputs, BYTES_OF_INSTRUCTION):
        adds, along = int(first > 0), first // 16
        lines += [
            f"setp.ne.b32 adds, {adds}, 0;",
            f"add.s64 a, left, {along};",
            f"add.s64 b, right, {along};",
            f"{instruction} {{{floats}}}, a, b, adds, 1, 1;",
        ]
    registers = ".reg .pred adds; .reg .b32 low; .reg .b64 a, b, left, right;"
    text = "\n".join(["{", registers, *lines, "wgmma.commit_group.sync.aligned;", "}"])
    return list(ptx(text, left, right, result_types=[internals.float32_type()] * count))


def described(name: str, address: str) -> list[str]:
    """Instructions that make the descriptor of a matrix from its address."""
    return [
        f"bfe.u32 low, {address}, 4, 14;",
        f"mov.b64 {name}, {{low, {WITH_128_BYTES_PER_ROW}}};",
    ]
