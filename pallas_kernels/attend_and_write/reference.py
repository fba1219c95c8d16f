"""The specification of `attend_and_write`: those of `qkv_write` and `paged_attention`."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.fp8_product.rounded import RoundedRows
from pallas_kernels.paged_attention.reference import paged_attention
from pallas_kernels.qkv_write.reference import qkv_write


def attend_and_write(
    qkv: Float[Array, "filled width fused"],
    query_norm: Float[Array, " head_dim"],
    key_norm: Float[Array, " head_dim"],
    cos: Float[Array, "batch width half"],
    sin: Float[Array, "batch width half"],
    key_pages: Float[Array, "pages page_size kv_heads head_dim"],
    value_pages: Float[Array, "pages page_size kv_heads head_dim"],
    page_table: Int[Array, "batch max_pages"],
    lengths: Int[Array, " batch"],
    counts: Int[Array, " batch"],
    *,
    eps: float,
    **options: Any,
) -> tuple[
    Float[Array, "filled width heads head_dim"] | RoundedRows,
    Float[Array, "pages page_size kv_heads head_dim"],
    Float[Array, "pages page_size kv_heads head_dim"],
]:
    cells = cells_of(page_table, lengths, counts, qkv.shape[1], key_pages.shape[1])
    written = cos, sin, cells, key_pages, value_pages
    query, *pages = qkv_write(qkv[None], query_norm, key_norm, *written, eps=eps)
    return paged_attention(query, *pages, page_table, lengths, counts, **options), *pages


def cells_of(
    page_table: Int[Array, "batch max_pages"],
    lengths: Int[Array, " batch"],
    counts: Int[Array, " batch"],
    width: int,
    page_size: int,
) -> Int[Array, "batch {width}"]:
    """The cells of the block's tokens. Those that are not kept go to the trash page."""
    offsets = jnp.arange(width, dtype=jnp.int32)
    positions = lengths[:, None] + offsets
    filled = {"mode": "fill", "fill_value": 0}
    pages = jnp.take_along_axis(page_table, positions // page_size, axis=1, **filled)
    kept = (offsets < counts[:, None]) & (pages > 0)
    return jnp.where(kept, pages * page_size + positions % page_size, offsets % page_size)
