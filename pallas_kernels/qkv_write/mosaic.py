"""`qkv_write` on Mosaic GPU: one thread block per token and tile of eight heads.

    fused qkv    | query heads ...... | key heads | value heads |      head_dim numbers each
    tiles        |  8  |  8  |  8  |  8  |     8     |     8     |

A tile may hold query, key and value heads. The parts of the product are added up, and the heads are
normed and rotated in registers. Heads that are also neighbours in their output, the packed queries
or a page, form a run, which is written from shared memory by one bulk copy.
"""

import dataclasses
import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.jax_internals import pl, plgpu
from pallas_kernels.kept import kept
from pallas_kernels.refusal import require
from pallas_kernels.tiles import THREADS, Shapes, load, named, rows_in_lanes, unswizzled

HEADS_PER_TILE = 8


@dataclasses.dataclass(frozen=True)
class Heads:
    """The static shape of one token's fused qkv, and the runs of heads that are copied together."""

    query: int
    kv: int
    dim: int
    page_size: int
    eps: float
    bulk: bool
    """Whether heads are written by bulk copies, which need Hopper, or by stores of each thread."""

    @property
    def all(self) -> int:
        return self.query + 2 * self.kv

    @property
    def group(self) -> int:
        return self.query // self.kv

    @property
    def query_run(self) -> int:
        """Query heads per copy."""
        return math.gcd(self.group, HEADS_PER_TILE)

    @property
    def page_run(self) -> int:
        """Key or value heads per copy."""
        return math.gcd(self.query, self.kv, HEADS_PER_TILE)

    @property
    def run(self) -> int:
        """Heads (rows of shared memory) per tile of the layout; each copy takes whole tiles."""
        return math.gcd(self.query_run, self.page_run) if self.group else self.page_run

    def scratch(self, dtype):
        shape = (HEADS_PER_TILE, self.dim)
        return (
            unswizzled(shape, dtype, (self.run, self.dim // 2))
            if self.bulk
            else plgpu.SMEM(shape, dtype)
        )


@kept(static_argnames=("eps", "bulk", "interpret"))
def qkv_write(
    qkv: Float[Array, "parts filled width fused"],
    query_norm: Float[Array, " head_dim"] | None,
    key_norm: Float[Array, " head_dim"],
    cos: Float[Array, "batch width half"],
    sin: Float[Array, "batch width half"],
    cells: Int[Array, "batch width"],
    key_pages: Float[Array, "pages page_size kv_heads head_dim"],
    value_pages: Float[Array, "pages page_size kv_heads head_dim"],
    *,
    eps: float,
    bulk: bool = True,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[
    Float[Array, "batch kv_heads width group head_dim"],
    Float[Array, "pages page_size kv_heads head_dim"],
    Float[Array, "pages page_size kv_heads head_dim"],
]:
    heads = heads_of(
        qkv,
        query_norm,
        key_norm,
        cos,
        sin,
        cells,
        key_pages,
        value_pages,
        eps=eps,
        bulk=bulk,
    )
    parts, batch, width = qkv.shape[0], *cells.shape
    kv_heads, head_dim, dtype = heads.kv, heads.dim, key_pages.dtype
    keys, values = jax.new_ref(key_pages), jax.new_ref(value_pages)
    packed = jax.ShapeDtypeStruct((batch, kv_heads, width, heads.group, head_dim), dtype)
    queries = plgpu.kernel(
        named("qkv_write", functools.partial(write_tile, heads)),
        out_type=(packed,) if heads.group else (),
        grid=(batch, width, -(-heads.all // HEADS_PER_TILE)),
        grid_names=("request", "token", "tile"),
        num_threads=1,
        thread_name="warpgroup",
        scratch_types={"done": heads.scratch(dtype)},
        interpret=interpret,
    )(
        qkv.reshape(parts, -1, width, heads.all, head_dim),
        key_norm if query_norm is None else query_norm,
        key_norm,
        cos,
        sin,
        cells,
        keys,
        values,
    )
    query = queries[0] if heads.group else jnp.zeros(packed.shape, packed.dtype)
    return query, jax.freeze(keys), jax.freeze(values)


def heads_of(
    qkv: Float[Shapes, "parts filled width fused"],
    query_norm: Float[Shapes, " head_dim"] | None,
    key_norm: Float[Shapes, " head_dim"],
    cos: Float[Shapes, "batch width half"],
    sin: Float[Shapes, "batch width half"],
    cells: Int[Shapes, "batch width"],
    key_pages: Float[Shapes, "pages page_size kv_heads head_dim"],
    value_pages: Float[Shapes, "pages page_size kv_heads head_dim"],
    *,
    eps: float,
    bulk: bool = True,
) -> Heads:
    """The heads of this call; raises `NotForThisKernel` if the kernel cannot do it."""
    dtype, batch = key_pages.dtype, cells.shape[0]
    _, page_size, kv_heads, head_dim = key_pages.shape
    heads = Heads(qkv.shape[3] // head_dim - 2 * kv_heads, kv_heads, head_dim, page_size, eps, bulk)
    require(qkv.shape[1] >= batch, f"qkv of {qkv.shape[1]} requests", f"at least {batch}, as cells")
    require(
        value_pages.dtype == dtype,
        f"key pages in {dtype} and value pages in {value_pages.dtype}",
        "one dtype",
    )
    require(
        qkv.dtype in (dtype, jnp.float32),
        f"qkv in {qkv.dtype}",
        f"float32 or the dtype of the pages, {dtype}",
    )
    require(head_dim in (64, 128, 256), f"head_dim {head_dim}", "64, 128 or 256")
    require(
        heads.all >= HEADS_PER_TILE,
        f"{heads.all} query, key and value heads",
        f"at least {HEADS_PER_TILE}",
    )
    require(
        bulk or heads.run * head_dim % THREADS == 0,
        f"head_dim {head_dim} with {heads.group} query heads per key-value head",
        "head_dim 128 or an even number of query heads",
    )
    return heads


def write_tile(
    heads: Heads, qkv, query_norm, key_norm, cos, sin, cells, keys, values, *queries, done
) -> None:
    request, token = lax.axis_index("request"), lax.axis_index("token")
    start = lax.axis_index("tile") * HEADS_PER_TILE
    # If the last tile would reach beyond the heads, it starts earlier; heads that it shares with
    # the tile before it are not written twice.
    base = jnp.minimum(start, heads.all - HEADS_PER_TILE)
    tile = (request, token, pl.ds(base, HEADS_PER_TILE))
    product = add_parts([qkv.at[(part, *tile)] for part in range(qkv.shape[0])], heads, done.dtype)
    rotated = norm_and_rotate(
        heads, product, base, query_norm, key_norm, cos.at[request, token], sin.at[request, token]
    )
    half = heads.dim // 2
    for i, values_of_half in enumerate(rotated):
        done[:, pl.ds(i * half, half)] = values_of_half.astype(done.dtype)
    if heads.bulk:
        plgpu.commit_smem()

    cell = cells[request, token]
    page, offset = lax.div(cell, heads.page_size), lax.rem(cell, heads.page_size)
    send = functools.partial(send_heads, heads.bulk, done, base, start)
    for query in queries:
        place = lambda h: query.at[  # noqa: B023
            request, lax.div(h, heads.group), token, pl.ds(lax.rem(h, heads.group), heads.query_run)
        ]
        send(heads.query_run, 0, heads.query, place)
    for first, pages in ((heads.query, keys), (heads.query + heads.kv, values)):
        place = lambda h, pages=pages: pages.at[page, offset, pl.ds(h, heads.page_run)]
        send(heads.page_run, first, first + heads.kv, place)
    if heads.bulk:
        # Not until they have arrived: whoever reads them is a kernel that begins after this one.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def add_parts(parts: list, heads: Heads, dtype) -> list:
    """Adds up the parts of the product; returns the first and the second half of eight heads.

    The two numbers that are rotated together are in the same lane.
    """
    layout = rows_in_lanes(heads.dim // 2)
    halves_of_parts = [halves(part, heads.dim, layout) for part in parts]
    wide = [[half.astype(jnp.float32) for half in part] for part in halves_of_parts]
    totals = (functools.reduce(operator.add, half) for half in zip(*wide))
    return [total.astype(dtype).astype(jnp.float32) for total in totals]


def norm_and_rotate(heads: Heads, product, base, query_norm, key_norm, cos, sin) -> tuple[Any, Any]:
    """Norms and rotates both halves of eight heads; value heads stay unchanged."""
    layout = rows_in_lanes(heads.dim // 2)
    per_column = layout.reduce(0)
    x1, x2 = product
    spread = lambda x: lax.broadcast_in_dim(x.astype(jnp.float32), x1.shape, [1])
    c, s = (spread(load(ref, per_column)) for ref in (cos, sin))
    head = base + plgpu.broadcasted_iota(jnp.int32, x1.shape, 0, layout=layout)
    scale1, scale2 = (
        jnp.where(head < heads.query, spread(q), spread(k))
        for q, k in zip(
            halves(query_norm, heads.dim, per_column), halves(key_norm, heads.dim, per_column)
        )
    )
    mean = (x1 * x1 + x2 * x2).sum(axis=1) * (1.0 / heads.dim)
    inverse = lax.broadcast_in_dim(lax.rsqrt(mean + heads.eps), x1.shape, [0])
    n1, n2 = x1 * inverse * scale1, x2 * inverse * scale2
    is_value = head >= heads.query + heads.kv
    return jnp.where(is_value, x1, n1 * c - n2 * s), jnp.where(is_value, x2, n2 * c + n1 * s)


def send_heads(bulk: bool, done, base, start, run: int, low: int, high: int, place) -> None:
    """Writes this tile's heads in [low, high), `run` at a time. `place(i)` is the target of the run
    that starts at head low + i."""
    for j in range(0, HEADS_PER_TILE, run):
        first = base + j
        in_range = (first >= start) & (first >= low) & (first < high)
        copy = functools.partial(copy_run if bulk else store_run, done, j, run, place, first - low)
        pl.when(in_range)(copy)


def copy_run(done, j: int, run: int, place, head) -> None:
    plgpu.copy_smem_to_gmem(done.at[pl.ds(j, run)], place(head))


def store_run(done, j: int, run: int, place, head) -> None:
    shape = (run, done.shape[1])
    layout = plgpu.Layout.WG_STRIDED(shape, vec_size=math.prod(shape) // THREADS)
    place(head)[...] = load(done.at[pl.ds(j, run)], layout)


def halves(ref, dim: int, layout):
    return tuple(load(ref.at[..., pl.ds(i * dim // 2, dim // 2)], layout) for i in range(2))
