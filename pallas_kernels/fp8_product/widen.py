"""From e4m3 in shared memory to bfloat16 in registers, as the left side of a matrix instruction.

`astype` does the same, but the compiler then keeps the 32 addresses of a thread in registers, which
are needed for sums. Here they are computed from one address whenever they are used.
"""

import jax.numpy as jnp

from pallas_kernels import jax_internals as internals
from pallas_kernels.fp8_product.quantise import BLOCK
from pallas_kernels.jax_internals import inline_mgpu, plgpu, ptx, swizzle, tiling

UNIT = 64
"""Outputs of a chunk, the most that one warpgroup multiplies at a time."""
ACC = plgpu.Layout.WGMMA
PIECE = 16
"""Bytes that the swizzle of shared memory moves together, and inputs of one matrix instruction."""
ROWS = 8
"""Rows (outputs) after which the swizzle repeats."""
PLACES = ((32, 4, 2 * ROWS * BLOCK), (4, ROWS, BLOCK + PIECE), (1, 4, 2))
"""Where a thread's first pair is, as (divisor, size, stride) for `sum_over_thread`. Each warp has
two times eight outputs. Four threads share an output, whose pieces are swizzled by its number, and
each of them has two of eight inputs."""
PAIRS_OF_PIECE = (0, ROWS * BLOCK, ROWS, ROWS * BLOCK + ROWS)
"""Where a thread's pairs of a piece are, in the order of its registers: at its first place, eight
outputs further, eight inputs further, and both."""

# Hopper cannot convert e4m3 to bfloat16 directly. Nothing is rounded on the way.
WIDEN = """{{
.reg .b32 address, both, low, high; .reg .b16 pair, first, second;
xor.b32 address, $1, {piece};
ld.shared.b16 pair, [address + {offset}];
cvt.rn.f16x2.e4m3x2 both, pair;
mov.b32 {{first, second}}, both;
cvt.f32.f16 low, first;
cvt.f32.f16 high, second;
cvt.rn.bf16x2.f32 $0, high, low;
}}"""


def widen(weights, first_input: int, inputs: int):
    """A chunk [outputs, inputs] of e4m3, from an input on, as an array of bfloat16."""

    @inline_mgpu(
        arg_types=(plgpu.RefType((tiling((ROWS, BLOCK)), swizzle(BLOCK))),),
        return_type=plgpu.ShapeDtypeStruct((UNIT, inputs), jnp.dtype(jnp.bfloat16), layout=ACC),
    )
    def pairs_of_thread(_, weights):
        first = internals.sum_over_thread(internals.shared_address(weights), PLACES)
        pairs = [
            ptx(
                WIDEN.format(piece=piece, offset=offset),
                first,
                result_types=internals.int32_type(),
            )
            for piece in range(first_input, first_input + inputs, PIECE)
            for offset in PAIRS_OF_PIECE
        ]
        return internals.array_of_pairs(pairs, (UNIT, inputs), ACC)

    return pairs_of_thread(weights)
