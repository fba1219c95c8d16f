"""Paged attention in plain XLA that reads no further than the longest context of the batch.

The reference gathers every page of the table, so each request costs as much as the longest one
that it could become. Here a loop gathers PIECE positions at a time, up to the end of the longest
context, and adds them up as flash attention does: each piece relative to the largest score so far,
to which what was added before is scaled. A piece that a token does not see changes nothing of what
the token has, so its bits do not depend on how far the loop goes.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import dispatch
from pallas_kernels.fp8_product.rounded import RoundedRows, Rounding
from pallas_kernels.paged_attention import reference
from pallas_kernels.paged_attention.reference import (
    MASKED,
    scores_of,
    seen_of_pages,
    visible_positions,
)

PIECE = 512
"""Positions that are gathered at once."""
WITHOUT_A_LOOP_ON_GPUS = 36 * 1024
"""Positions of the whole batch up to which a GPU gathers all. By default XLA keeps loops out of a
step's CUDA graph, and the host has to read how far they go, in every layer. On an H200 that takes
about 110 us, in which 16 tokens can attend to 26000 positions. The number is that of 32 requests
with 1024 positions each, and room for the blocks that they decode."""
MOST_SCORES_ON_GPUS = 8 * 512 * 2048
"""Scores per head, tokens times positions, up to which it does so: they are in memory all at once.
So many take 1.0 GiB with 32 heads."""


def paged_attention(
    query: Float[Array, "batch kv_heads width group head_dim"],
    key_pages: Float[Array, "pages page_size kv_heads head_dim"],
    value_pages: Float[Array, "pages page_size kv_heads head_dim"],
    page_table: Int[Array, "batch max_pages"],
    lengths: Int[Array, " batch"],
    counts: Int[Array, " batch"],
    *,
    filled_batch: int,
    rounding: Rounding | None = None,
    **mask: Any,
) -> Float[Array, "filled width heads head_dim"] | RoundedRows:
    page_size = key_pages.shape[1]
    at_once = max(1, PIECE // page_size)
    given = query, key_pages, value_pages, page_table, lengths, counts
    if page_table.shape[1] <= max(at_once, whole_on_gpus(query.shape, page_size)):
        options = {"filled_batch": filled_batch, "rounding": rounding}
        return reference.paged_attention(*given, **options, **mask)
    attended = over_pieces(*given, at_once=at_once, **mask)
    return reference.in_8_bits(reference.filled_up(attended, filled_batch), rounding)


def whole_on_gpus(query_shape: tuple[int, ...], page_size: int) -> int:
    """Pages per request up to which the default device gathers all; 0 if it is no GPU."""
    if dispatch.default_device().platform != "gpu":
        return 0
    batch, _, width, *_ = query_shape
    positions = min(WITHOUT_A_LOOP_ON_GPUS, MOST_SCORES_ON_GPUS // width)
    return positions // (batch * page_size)


def over_pieces(
    query: Float[Array, "batch kv_heads width group head_dim"],
    key_pages: Float[Array, "pages page_size kv_heads head_dim"],
    value_pages: Float[Array, "pages page_size kv_heads head_dim"],
    page_table: Int[Array, "batch max_pages"],
    lengths: Int[Array, " batch"],
    counts: Int[Array, " batch"],
    *,
    at_once: int,
    causal: bool,
    window: int | None,
    window_of_block: bool = False,
) -> Float[Array, "batch width heads head_dim"]:
    """`at_once` pages of each request at a time, up to the longest that has tokens in the block."""
    batch, kv_heads, width, group, head_dim = query.shape
    positions = at_once * key_pages.shape[1]
    table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % at_once)))
    per_query = batch, kv_heads, width, group

    def add(piece: Array, before: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        largest, total, attended = before
        pages = lax.dynamic_slice_in_dim(table, piece * at_once, at_once, axis=1)
        visible = visible_positions(
            lengths,
            counts,
            width,
            positions,
            causal,
            window,
            window_of_block,
            first=piece * positions,
        )
        keys, values = seen_of_pages(key_pages, value_pages, pages, visible)
        scores = scores_of(query, keys, visible)
        now = jnp.maximum(largest, scores.max(axis=-1))
        shrunk = jnp.exp(largest - now)
        seen = visible[:, None, :, None, :]
        weights = jnp.where(seen, jnp.exp(scores - now[..., None]), 0)
        products = jnp.einsum(
            "shwgp,sphd->shwgd",
            weights.astype(values.dtype),
            values,
            preferred_element_type=jnp.float32,
        )
        return (
            now,
            total * shrunk + weights.sum(axis=-1),
            attended * shrunk[..., None] + products,
        )

    nothing = (
        jnp.full(per_query, MASKED, jnp.float32),
        jnp.zeros(per_query, jnp.float32),
        jnp.zeros((*per_query, head_dim), jnp.float32),
    )
    longest = jnp.max(jnp.where(counts > 0, lengths + counts, 0))
    pieces = (longest + positions - 1) // positions
    _, total, attended = lax.fori_loop(0, pieces, add, nothing)
    attended = attended / jnp.where(total == 0, 1, total)[..., None]
    by_token = attended.transpose(0, 2, 1, 3, 4).astype(query.dtype)
    return by_token.reshape(batch, width, kv_heads * group, head_dim)
