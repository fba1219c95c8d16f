"""Asynchronous products of e4m3 by e4m3: a warpgroup begins them and waits before it adds them up.

In between it does work that does not need them. `plgpu.wgmma` would wait at once, and it adds to
sums, which would have to be set to zero first. Here the first instruction overwrites the sums.
"""

import functools

import jax.numpy as jnp

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


def begin_product(weights, rows, interpreted: bool):
    """Begins `weights @ rows.T`, for weights [UNIT, BLOCK] and rows [rows, BLOCK]."""
    if interpreted:
        left, right = (ref[...].astype(jnp.float32) for ref in (weights, rows))
        plgpu.commit_smem()
        return jnp.dot(left, right.T)
    shape = (UNIT, rows.shape[0])

    @inline_mgpu(
        arg_types=(CHUNK, CHUNK),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.float32), layout=IN_FLIGHT),
    )
    def begin(_, *operands):
        left, right = map(internals.shared_address, operands)
        products = products_in_flight(shape[1], left, right, BLOCK)
        return internals.array_of(products, shape, IN_FLIGHT)[0]

    return begin(weights, rows)


def wait_and_add(sums, products, scales, interpreted: bool):
    """Waits for the products. Returns `sums + products * scales`, rounded once, or
    `sums + products` if there are no scales."""
    if interpreted:
        plgpu.commit_smem()  # the scales have been read
        return sums + (products if scales is None else products * scales)
    layouts = (ACC, IN_FLIGHT) if scales is None else (ACC, IN_FLIGHT, ACC)
    arrays = (sums, products) if scales is None else (sums, products, scales)
    add = "add.rn.f32 $0, $1, $2;" if scales is None else "fma.rn.f32 $0, $2, $3, $1;"

    @inline_mgpu(
        arg_types=layouts,
        return_type=plgpu.ShapeDtypeStruct(sums.shape, jnp.dtype(jnp.float32), layout=ACC),
    )
    def added(_, *arrays):
        ptx("wgmma.wait_group.sync.aligned 0;")
        compute = functools.partial(ptx, add, result_types=internals.float32_type())
        numbers = zip(*map(internals.floats_of, arrays), strict=True)
        return internals.array_of([compute(*each) for each in numbers], sums.shape, ACC)[0]

    return added(*arrays)


def products_in_flight(rows: int, left, right, inputs: int) -> list:
    """Begins the product of 64 outputs at the address `left` with a matrix of rows at the address
    `right`, both e4m3. Returns the floats of this thread, which are valid only after
    `wgmma.wait_group`."""
    count = rows // 2
    floats = ", ".join(f"${i}" for i in range(count))
    instruction = f"wgmma.mma_async.sync.aligned.m64n{rows}k{BYTES_OF_INSTRUCTION}.f32.e4m3.e4m3"
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
