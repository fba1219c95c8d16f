"""How a product with an 8-bit matrix is split over thread blocks, and what the kernel refuses."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Float

from pallas_kernels.fp8_product.chunk import UNIT
from pallas_kernels.fp8_product.quantise import BLOCK, E4M3
from pallas_kernels.jax_internals import plgpu
from pallas_kernels.refusal import require
from pallas_kernels.tiles import SHARED_BYTES, Shapes, swizzled

WARPGROUPS = 2
"""Of a thread block; each multiplies UNIT outputs of a tile with all of its rows."""
TILE = WARPGROUPS * UNIT
"""Outputs of a thread block: those of a scale's block."""
EIGHT = 8
"""Rows of a thread block are a multiple of this."""
MOST_ROWS = 128
"""Rows of a thread block, whose sums take half of the registers that a thread may have."""
FEW_ROWS = 64
"""Up to so many rows there is room for two thread blocks on a multiprocessor."""
MULTIPROCESSORS = 132
"""Of an H100."""
PARTS = (1, 2, 4)
WORTH_PARTS = 0.9
"""More parts are taken if they need less than this share of the time, because they are written in
float32 and read again."""
SMALL_BYTES = 2 * 1024
"""Shared memory for barriers and alignment."""
MOST_STAGES = 8


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about one call."""

    tokens: int
    """Rows of the call, without padding."""
    inputs: int
    outputs: int
    blocks: bool
    """Whether scales belong to blocks of the matrix; if not, to its outputs."""
    dtype: Any
    """Of the rows."""
    interpreted: bool

    @property
    def row_tiles(self) -> int:
        return -(-self.tokens // MOST_ROWS)

    @property
    def rows(self) -> int:
        """Rows of a thread block, all as even as eights can be."""
        return -(-self.tokens // (self.row_tiles * EIGHT)) * EIGHT

    @property
    def padded(self) -> int:
        return self.row_tiles * self.rows

    @property
    def tiles(self) -> int:
        return self.outputs // TILE

    @property
    def parts(self) -> int:
        """Parts of the inputs with which the thread blocks fill the GPU best."""
        best = 1
        for parts in PARTS:
            faster = self.time(parts) < WORTH_PARTS * self.time(best)
            if faster and self.inputs % (parts * BLOCK) == 0:
                best = parts
        return best

    def time(self, parts: int) -> float:
        """The time of a product in so many parts, in arbitrary units. Few rows take as long as the
        weights are read, by as many multiprocessors as there are thread blocks; more rows take a
        round of arithmetic for all thread blocks that run at once."""
        blocks = self.tiles * self.row_tiles * parts
        if self.rows <= FEW_ROWS:
            return 1 / min(blocks, MULTIPROCESSORS)
        return -(-blocks // MULTIPROCESSORS) / parts

    @property
    def steps(self) -> int:
        """Blocks of inputs that a thread block multiplies, one per pipeline stage."""
        return self.inputs // (self.parts * BLOCK)

    @property
    def stages(self) -> int:
        """As many as fit into the shared memory of this thread block."""
        blocks_at_once = 2 if self.rows <= FEW_ROWS else 1
        per_block = SHARED_BYTES // blocks_at_once - SMALL_BYTES
        stage = BLOCK * (TILE + self.rows * jnp.dtype(self.dtype).itemsize)
        return min(per_block // stage, MOST_STAGES)

    def scratch(self) -> dict[str, Any]:
        barrier = lambda arrivals: plgpu.Barrier(num_arrivals=arrivals, num_barriers=self.stages)
        return {
            "weights": swizzled((self.stages, TILE, BLOCK), E4M3),
            "rows": swizzled((self.stages, self.rows, BLOCK), self.dtype),
            "loaded": barrier(2),
            "used": barrier(WARPGROUPS),
        }


def plan_of(
    x: Float[Shapes, "*tokens inputs"],
    weight: Float[Shapes, "outputs inputs"],
    scales: Float[Shapes, "scaled_outputs pieces"],
    *,
    quantise_inputs: bool = False,
    interpreted: bool = False,
) -> Plan:
    """How this call runs; raises `NotForThisKernel` if the kernel cannot do it."""
    require(not quantise_inputs, "inputs that are rounded to e4m3", "inputs as they are")
    require(x.dtype == jnp.bfloat16, f"inputs in {x.dtype}", "bfloat16")
    require(weight.dtype == E4M3, f"a matrix in {weight.dtype}", E4M3.name)
    require(scales.dtype == jnp.float32, f"scales in {scales.dtype}", "float32")
    tokens, (outputs, inputs) = math.prod(x.shape[:-1]), weight.shape
    require(tokens > 0, "no tokens", "at least one")
    for name, size in (("inputs", inputs), ("outputs", outputs)):
        whole = size > 0 and size % BLOCK == 0
        require(whole, f"{size} {name}", f"a multiple of {BLOCK}")
    of_blocks = (outputs // BLOCK, inputs // BLOCK)
    known = scales.shape in (of_blocks, (outputs, 1))
    require(known, f"scales of shape {scales.shape}", f"{of_blocks} or {(outputs, 1)}")
    return Plan(tokens, inputs, outputs, scales.shape == of_blocks, x.dtype, interpreted)
