"""Paged attention on Mosaic GPU for every GPU since Ampere: mma.sync, no bulk copies.

The online softmax is that of `kernel.py`. One thread block (one warpgroup) takes a request, a
key-value head and 64 rows. The keys and values of the next tile are prefetched into registers while
the current tile is multiplied.

If there are few such thread blocks, several share a context: split t % splits takes tile t. Each
writes its softmax state to global memory, and XLA adds the states up (`merged`). On GPUs before
Hopper thread blocks cannot write into each other's shared memory, as the splits of `kernel.py` do.

The kernel compiles for sm_80, 89, 90, 100 and 120. It has run on an H100 and an H200, and was timed
on an H200 that was told to use it.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.jax_internals import pl, plgpu
from pallas_kernels.paged_attention.blocks import TILE_ROWS, BlockSizes, Shape, Tiling, tile
from pallas_kernels.paged_attention.kernel import MASKED, by_row
from pallas_kernels.paged_attention.plan import require_same_dtype, require_tiles_fit
from pallas_kernels.paged_attention.seen import Mask, require_seen_by_kernels
from pallas_kernels.paged_attention.splits import add, divide, tiles_of_split
from pallas_kernels.tiles import Shapes, load, named, rows_in_lanes

KV_TILE = 32
WARPS = 4
MOST_BLOCKS = 256
"""The most thread blocks of a call with splits: about two for each multiprocessor, as many as have
registers. With 8 and 32 requests no other number was faster on an H200."""
POSITIONS_PER_SQUARE = 16
"""A context of n positions gets at most sqrt(n / POSITIONS_PER_SQUARE) splits. With more splits
each attends to fewer positions, but there are more results to add up. So the best number grows with
the square root of the context: on an H200 8 for 1024 positions, and 16 for 4096."""
HEAD_DIMS = (64, 128)
"""Wider heads do not fit in the registers beside the next tile."""


@dataclasses.dataclass(frozen=True)
class Call:
    """Everything static about one call."""

    shape: Shape
    tiling: Tiling
    splits: int
    """Thread blocks that share a context."""
    mask: Mask
    dtype: Any
    interpreted: bool

    @property
    def out_type(self) -> Any:
        """What the kernel writes: attention's result, or the softmax state of every split."""
        shape = self.shape
        leading = shape.batch, shape.kv_heads, shape.row_tiles
        if self.splits == 1:
            return jax.ShapeDtypeStruct((*leading, TILE_ROWS, shape.head_dim), self.dtype)
        of_rows = jax.ShapeDtypeStruct((*leading, self.splits, TILE_ROWS), jnp.float32)
        return of_rows, of_rows, jax.ShapeDtypeStruct((*of_rows.shape, shape.head_dim), jnp.float32)

    @property
    def scale(self) -> float:
        return self.shape.head_dim**-0.5 * math.log2(math.e)

    def layout(self, kind: str):
        return getattr(plgpu.Layout, f"MMA_{kind}")(self.dtype, m_warps=WARPS)


# Jitted by itself, so that all layers of a model share one lowered kernel.
@functools.partial(
    jax.jit, static_argnames=("causal", "window", "window_of_block", "splits", "interpret")
)
def paged_attention(
    query: Float[Array, "batch kv_heads width group head_dim"],
    key_pages: Float[Array, "pages page_size kv_heads head_dim"],
    value_pages: Float[Array, "pages page_size kv_heads head_dim"],
    page_table: Int[Array, "batch max_pages"],
    lengths: Int[Array, " batch"],
    counts: Int[Array, " batch"],
    *,
    causal: bool,
    window: int | None,
    window_of_block: bool = False,
    splits: int | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "batch width heads head_dim"]:
    call = call_of(
        query,
        key_pages,
        value_pages,
        page_table,
        lengths,
        counts,
        causal=causal,
        window=window,
        window_of_block=window_of_block,
        splits=splits,
        interpreted=interpret is not None,
    )
    batch, kv_heads, _, _, head_dim = query.shape
    out = plgpu.kernel(
        named("paged_attention_portable", functools.partial(attend, call)),
        out_type=call.out_type,
        grid=(batch, kv_heads, call.shape.row_tiles, call.splits),
        grid_names=("request", "head", "row_tile", "split"),
        num_threads=1,
        thread_name="warpgroup",
        scratch_types={
            "k": plgpu.SMEM((KV_TILE, head_dim), query.dtype),
            "v": plgpu.SMEM((KV_TILE, head_dim), query.dtype),
            "p": plgpu.SMEM((TILE_ROWS, KV_TILE), query.dtype),
            "o": plgpu.SMEM((TILE_ROWS, head_dim), query.dtype),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(by_row_tile(query, call), key_pages, value_pages, page_table, lengths, counts)
    return by_token(out if call.splits == 1 else merged(*out).astype(query.dtype), call)


def call_of(
    query: Float[Shapes, "batch kv_heads width group head_dim"],
    key_pages: Float[Shapes, "pages page_size kv_heads head_dim"],
    value_pages: Float[Shapes, "pages page_size kv_heads head_dim"],
    page_table: Int[Shapes, "batch max_pages"],
    lengths: Int[Shapes, " batch"],
    counts: Int[Shapes, " batch"],
    *,
    causal: bool,
    window: int | None,
    window_of_block: bool = False,
    splits: int | None = None,
    interpreted: bool = False,
) -> Call:
    """Everything static about this call; raises `NotForThisKernel` if the kernel cannot do it."""
    require_same_dtype(query, key_pages, value_pages)
    batch, kv_heads, width, group, head_dim = query.shape
    shape = Shape(batch, kv_heads, width, group, head_dim, key_pages.shape[1], page_table.shape[1])
    require_tiles_fit(shape, query.dtype, KV_TILE, HEAD_DIMS)
    mask = Mask(causal, window, window_of_block)
    require_seen_by_kernels(mask, width)
    tiling, splits = tile(shape, BlockSizes(KV_TILE)), splits or choose_splits(shape)
    return Call(shape, tiling, splits, mask, query.dtype, interpreted)


def choose_splits(shape: Shape) -> int:
    """As many as the GPU has room for, if each has enough of the longest context."""
    splits, positions = 1, shape.max_pages * shape.page_size
    while (
        2 * splits * shape.blocks * shape.row_tiles <= MOST_BLOCKS
        and (2 * splits) ** 2 * POSITIONS_PER_SQUARE <= positions
    ):
        splits *= 2
    return splits


def by_row_tile(
    query: Float[Array, "batch kv_heads width group head_dim"], call: Call
) -> Float[Array, "batch kv_heads row_tiles tile_rows head_dim"]:
    """The queries in row tiles: `span` tokens with their heads each, padded with rows of zeros."""
    shape = call.shape
    tokens = shape.row_tiles * shape.span
    query = jnp.pad(query, [(0, 0), (0, 0), (0, tokens - shape.width), (0, 0), (0, 0)])
    rows = shape.span * shape.group
    query = query.reshape(*query.shape[:2], shape.row_tiles, rows, shape.head_dim)
    return jnp.pad(query, [(0, 0)] * 3 + [(0, TILE_ROWS - rows), (0, 0)])


def merged(
    m: Float[Array, "batch kv_heads row_tiles splits tile_rows"],
    l: Float[Array, "batch kv_heads row_tiles splits tile_rows"],
    acc: Float[Array, "batch kv_heads row_tiles splits tile_rows head_dim"],
) -> Float[Array, "batch kv_heads row_tiles tile_rows head_dim"]:
    """What the splits of a context add up to."""
    return add([[part[:, :, :, split] for part in (m, l, acc)] for split in range(m.shape[3])])


def by_token(
    out: Float[Array, "batch kv_heads row_tiles tile_rows head_dim"], call: Call
) -> Float[Array, "batch width heads head_dim"]:
    shape = call.shape
    out = out[:, :, :, : shape.span * shape.group]
    out = out.reshape(shape.batch, shape.kv_heads, -1, shape.group, shape.head_dim)
    out = out[:, :, : shape.width].transpose(0, 2, 1, 3, 4)
    return out.reshape(shape.batch, shape.width, -1, shape.head_dim)


def attend(call: Call, query, keys, values, table, lengths, counts, *outs, k, v, p, o) -> None:
    request, head = lax.axis_index("request"), lax.axis_index("head")
    row_tile, split = lax.axis_index("row_tile"), lax.axis_index("split")
    shape, width = call.shape, call.shape.width
    acc_layout = call.layout("ACC")
    rows_layout = acc_layout.reduce(1)

    length = lengths[request]
    kept_end = length + counts[request]
    seen_tokens = jnp.minimum((row_tile + 1) * shape.span, width) if call.mask.causal else width
    end = jnp.minimum(length + seen_tokens, kept_end)
    steps = lax.div(end + (KV_TILE - 1), KV_TILE)
    first_token, first_step = row_tile * shape.span, jnp.int32(0)

    def token_of_row():
        row = plgpu.broadcasted_iota(jnp.int32, (TILE_ROWS,), 0, layout=rows_layout)
        return first_token + lax.div(row, call.shape.group)

    last = seen_from = start = None
    if call.mask.causal:
        last = jnp.minimum(length + token_of_row(), kept_end - 1)
    if call.mask.window is not None:
        start = seen_from = call.mask.first_seen(length, first_token)
        # Rows that nothing uses would have no layout, and Mosaic's search for one would not end.
        if not call.mask.window_of_block:
            seen_from = call.mask.first_seen(length, token_of_row())
        first_step = lax.div(start, KV_TILE)

    q = load(query.at[request, head, row_tile], call.layout("LHS"))
    fetch = functools.partial(load_tile, call, keys, values, table, request, head)

    def attend_tile(turn, carry):
        (m, l, acc), (key_tile, value_tile) = carry
        step = turn * call.splits + split
        k[...] = key_tile
        v[...] = zero_unseen(value_tile, step, start, end)
        next_tile = fetch(jnp.minimum(step + call.splits, steps - 1))
        s = multiply(call, zeros(call, KV_TILE), q, k.T)
        position = step * KV_TILE + plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=acc_layout)
        bound = end - 1 if last is None else lax.broadcast_in_dim(last, s.shape, [0])
        seen = position <= bound
        if seen_from is not None:
            seen &= position >= by_row(seen_from, s.shape)
        s = jnp.where(seen, s * call.scale, MASKED)
        m_new = jnp.maximum(m, s.max(axis=1))
        alpha = jnp.exp2(m - m_new)
        weights = jnp.exp2(s - lax.broadcast_in_dim(m_new, s.shape, [0]))
        l = l * alpha + weights.sum(axis=1)
        p[...] = weights.astype(call.dtype)
        weights = load(p, call.layout("LHS"))
        acc = acc * lax.broadcast_in_dim(alpha, acc.shape, [0])
        return (m_new, l, multiply(call, acc, weights, v)), next_tile

    filled = lambda value: plgpu.layout_cast(
        jnp.full((TILE_ROWS,), value, jnp.float32), rows_layout
    )
    sums = (filled(MASKED), filled(0.0), zeros(call, call.shape.head_dim))
    turns_before = functools.partial(tiles_of_split, split=split, splits=call.splits)
    first_turn, turns = turns_before(first_step), turns_before(steps)
    # A split that has no tile loads one that exists, too.
    first_tile = fetch(jnp.minimum(first_turn * call.splits + split, jnp.maximum(steps - 1, 0)))
    (m, l, acc), _ = lax.fori_loop(first_turn, turns, attend_tile, (sums, first_tile))
    if call.splits > 1:
        for ref, part in zip(outs, (m, l, acc)):
            ref[request, head, row_tile, split] = part
        return
    o[...] = divide(acc, l).astype(call.dtype)
    # The output is staged in shared memory, so that whole sectors are written.
    (out,) = outs
    out.at[request, head, row_tile][...] = load(o, rows_in_lanes(call.shape.head_dim))


def zeros(call: Call, columns: int):
    return plgpu.layout_cast(jnp.zeros((TILE_ROWS, columns), jnp.float32), call.layout("ACC"))


def multiply(call: Call, acc, left, right_ref):
    """`acc + left @ right`, with `right` in shared memory. The interpreter has no mma."""
    if call.interpreted:
        return acc + jnp.dot(left, right_ref[...], preferred_element_type=jnp.float32)
    right = load(right_ref, call.layout("RHS"))
    return plgpu.mma(acc, left, right)


def load_tile(call: Call, keys, values, table, request, head, step):
    """Loads the keys and values of one tile into registers, page by page."""
    shape, tiling = call.shape, call.tiling
    pieces = []
    for j in range(tiling.copies):
        position = step * KV_TILE + j * tiling.copy_rows
        entry = jnp.minimum(lax.div(position, shape.page_size), shape.max_pages - 1)
        offset = lax.rem(position, shape.page_size)
        source = (table[request, entry], pl.ds(offset, tiling.copy_rows), head)
        pieces.append((keys.at[source], values.at[source]))
    layout = rows_in_lanes(shape.head_dim)
    return tuple(
        jnp.concatenate([load(ref, layout) for ref in refs], axis=0) for refs in zip(*pieces)
    )


def zero_unseen(value_tile, step, start, end):
    """Zeroes the values at positions that no token may see: 0 (their weight) * NaN is NaN."""
    layout = rows_in_lanes(value_tile.shape[1])
    position = step * KV_TILE + plgpu.broadcasted_iota(
        jnp.int32, value_tile.shape, 0, layout=layout
    )
    seen = position < end
    if start is not None:
        seen &= position >= start
    return jnp.where(seen, value_tile, jnp.zeros_like(value_tile))
