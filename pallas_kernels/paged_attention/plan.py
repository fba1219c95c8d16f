"""Everything static about one call of the kernel, and the shared memory that it needs."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float

from pallas_kernels.fp8_product.quantise import BLOCK, E4M3
from pallas_kernels.fp8_product.rounding import type_of_scales
from pallas_kernels.jax_internals import STORES_ANY_LAYOUT, plgpu
from pallas_kernels.paged_attention.blocks import (
    TILE_ROWS,
    WIDE_HEAD,
    BlockSizes,
    Shape,
    Tiling,
    output_aligned,
    tile,
)
from pallas_kernels.paged_attention.rounding import EIGHT
from pallas_kernels.paged_attention.seen import Mask, require_seen_by_kernels
from pallas_kernels.paged_attention.splits import Exchange
from pallas_kernels.refusal import require
from pallas_kernels.tiles import SHARED_BYTES, Shapes, swizzled, unswizzled

HEAD_DIMS = (64, 128, 256)


@dataclasses.dataclass(frozen=True)
class Plan:
    shape: Shape
    sizes: BlockSizes
    tiling: Tiling
    exchange: Exchange
    dtype: Any
    mask: Mask
    interpreted: bool
    rounds: bool = False
    """Whether the result is rounded to 8 bits while it is written."""

    @property
    def rows(self) -> int:
        """Rows of a tile that hold queries. The other rows hold garbage and are not stored."""
        return self.shape.span * self.shape.group

    @property
    def value_bytes_per_row(self) -> int:
        """The swizzle of the values, in bytes. `wgmma` takes as many positions at once as numbers
        are swizzled together, so a tile of 32 positions needs a swizzle of 64 bytes."""
        return min(128, self.sizes.kv_tile * jnp.dtype(self.dtype).itemsize)

    @property
    def output_reuses_queries(self) -> bool:
        """Whether the output reuses the memory of the staged queries. With less shared memory, two
        thread blocks fit on a multiprocessor."""
        return self.shape.staged and self.sizes.splits == 1 and not self.rounds

    @property
    def repeats(self) -> bool:
        """Whether some row tile repeats rows of the one before it."""
        return not self.shape.even or self.shape.row_tiles % self.sizes.warpgroups != 0

    @property
    def scale(self) -> float:
        """Factor on the scores, for a softmax that uses exp2 instead of exp."""
        return self.shape.head_dim**-0.5 * math.log2(math.e)

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.shape.batch, self.shape.kv_heads, self.tiling.row_blocks

    def scratch(self) -> dict[str, Any]:
        sizes, head_dim, dtype = self.sizes, self.shape.head_dim, self.dtype
        query_rows = (sizes.warpgroups, TILE_ROWS, head_dim)
        tile_bar = plgpu.Barrier(num_arrivals=self.tiling.copies, num_barriers=sizes.stages)
        scratch = {
            "q": swizzled(query_rows, dtype),
            "k": swizzled((sizes.stages, sizes.kv_tile, head_dim), dtype),
            "v": swizzled((sizes.stages, sizes.kv_tile, head_dim), dtype, self.value_bytes_per_row),
            "q_bar": plgpu.Barrier(num_arrivals=sizes.warpgroups),
            "k_bar": tile_bar,
            "v_bar": tile_bar,
            **self.exchange.scratch(),
        }
        if not self.output_reuses_queries:
            shape = sizes.warpgroups, self.exchange.rows, self.exchange.columns
            scratch["o"] = self.copied_by_token(shape, E4M3 if self.rounds else dtype)
        if self.shape.staged:
            scratch["q_raw"] = self.copied_by_token(query_rows, dtype)
        if sizes.warpgroups > 1:
            scratch["tail_bar"] = plgpu.Barrier(num_arrivals=sizes.warpgroups)
            scratch["free_bar"] = plgpu.Barrier(
                num_arrivals=sizes.warpgroups, num_barriers=sizes.stages
            )
        return scratch

    def copied_by_token(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Shared memory from which bulk copies take the rows of single tokens. Wide heads get an
        explicit tiling, because newer versions of jax would search for one for minutes. jax 0.11
        does not search, and cannot use a given one."""
        if self.shape.head_dim < WIDE_HEAD or not STORES_ANY_LAYOUT:
            return plgpu.SMEM(shape, dtype)
        return unswizzled(shape, dtype, (math.gcd(self.shape.group, TILE_ROWS), shape[-1]))

    @property
    def shared_bytes(self) -> int:
        """Shared memory that a thread block needs for its tiles and mailbox."""
        return sum(
            math.prod(array.shape) * jnp.dtype(array.dtype).itemsize
            for array in self.scratch().values()
            if not isinstance(array, (plgpu.Barrier, plgpu.ClusterBarrier))
        )

    def outputs(self, filled_batch: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        shape, row_tiles = self.shape, self.tiling.row_blocks * self.sizes.warpgroups
        heads = (shape.kv_heads, shape.group, shape.head_dim)
        by_token = filled_batch, shape.width, *heads
        buffers = self.exchange.buffers(shape.batch, shape.kv_heads, row_tiles)
        if not self.rounds:
            return jax.ShapeDtypeStruct(by_token, self.dtype), *buffers
        sizes = filled_batch * shape.width, math.prod(heads)
        return jax.ShapeDtypeStruct(by_token, E4M3), type_of_scales(*sizes, "pieces"), *buffers


def require_same_dtype(
    query: Float[Shapes, "batch kv_heads width group head_dim"],
    key_pages: Float[Shapes, "pages page_size kv_heads head_dim"],
    value_pages: Float[Shapes, "pages page_size kv_heads head_dim"],
) -> None:
    dtypes = [str(array.dtype) for array in (query, key_pages, value_pages)]
    found = f"query, keys and values in {', '.join(dtypes)}"
    require(len(set(dtypes)) == 1, found, "one dtype")


def require_tiles_fit(shape: Shape, dtype, kv_tile: int, head_dims=HEAD_DIMS) -> None:
    """The requirements of both kernels, with `kv_tile` positions per tile."""
    require(
        shape.group <= TILE_ROWS,
        f"{shape.group} query heads per key-value head",
        f"at most {TILE_ROWS}",
    )
    *first, last = head_dims
    expected = f"{', '.join(map(str, first))} or {last}"
    require(shape.head_dim in head_dims, f"head_dim {shape.head_dim}", expected)
    require(
        jnp.dtype(dtype).itemsize == 2, f"queries and pages in {jnp.dtype(dtype)}", "a 16-bit dtype"
    )
    require(
        kv_tile % shape.page_size == 0 or shape.page_size % kv_tile == 0,
        f"page size {shape.page_size}",
        f"one that divides {kv_tile} or is a multiple of it",
    )
    require(shape.page_size % 8 == 0, f"page size {shape.page_size}", "a multiple of 8")


def make_plan(
    shape: Shape,
    sizes: BlockSizes,
    dtype,
    mask: Mask,
    interpreted: bool,
    rounds: bool = False,
) -> Plan:
    require_tiles_fit(shape, dtype, sizes.kv_tile)
    require_seen_by_kernels(mask, shape.width)
    require(
        output_aligned(shape, sizes.splits),
        f"{sizes.splits} splits",
        "fewer: each must write a multiple of 128 bytes per token",
    )
    mailed = sizes.splits > 1 and not interpreted
    of_rows = rounds and sizes.splits > 1
    known = sizes.splits, shape.head_dim, sizes.warpgroups
    exchange = Exchange(*known, mailed, interpreted, by_rows=of_rows)
    plan = Plan(shape, sizes, tile(shape, sizes), exchange, dtype, mask, interpreted, rounds)
    if plan.shared_bytes <= SHARED_BYTES:
        return plan
    return dataclasses.replace(plan, exchange=dataclasses.replace(exchange, mailed=False))


def can_round(shape: Shape, sizes: BlockSizes) -> bool:
    """Whether the kernel can round its result while it writes it: a head must be one piece, and
    either one thread block has whole rows, or two share them, and each has all heads of its
    tokens."""
    whole = sizes.splits == 1 or (sizes.splits == 2 and EIGHT % shape.group == 0)
    return shape.head_dim == BLOCK and whole
