"""The specification of paged attention, in plain XLA: gather the pages, mask, softmax."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.fp8_product.rounded import RoundedRows, Rounding, rounded_rows

MASKED = -1e30


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
    filled_batch: int,
    rounding: Rounding | None = None,
) -> Float[Array, "filled width heads head_dim"] | RoundedRows:
    batch, kv_heads, width, group, head_dim = query.shape
    positions = page_table.shape[1] * key_pages.shape[1]
    mask = causal, window, window_of_block
    visible = visible_positions(lengths, counts, width, positions, *mask)
    keys, values = seen_of_pages(key_pages, value_pages, page_table, visible)
    weights = jax.nn.softmax(scores_of(query, keys, visible), axis=-1).astype(values.dtype)
    attended = jnp.einsum("shwgp,sphd->swhgd", weights, values, preferred_element_type=jnp.float32)
    attended = attended.astype(query.dtype).reshape(batch, width, kv_heads * group, head_dim)
    return in_8_bits(filled_up(attended, filled_batch), rounding)


def in_8_bits(
    attended: Float[Array, "filled width heads head_dim"], rounding: Rounding | None
) -> Float[Array, "filled width heads head_dim"] | RoundedRows:
    """Rounded to 8 bits if `rounding` says how; then the heads of a token are one row."""
    if rounding is None:
        return attended
    return rounded_rows(attended.reshape(*attended.shape[:2], -1), rounding)


def filled_up(
    attended: Float[Array, "batch width heads head_dim"], filled_batch: int
) -> Float[Array, "filled width heads head_dim"]:
    """Appends requests of zeros up to `filled_batch`."""
    return jnp.pad(attended, ((0, filled_batch - attended.shape[0]), (0, 0), (0, 0), (0, 0)))


def seen_of_pages(
    key_pages: Float[Array, "pages page_size kv_heads head_dim"],
    value_pages: Float[Array, "pages page_size kv_heads head_dim"],
    page_table: Int[Array, "batch max_pages"],
    visible: Bool[Array, "batch width positions"],
) -> tuple[
    Float[Array, "batch positions kv_heads head_dim"],
    Float[Array, "batch positions kv_heads head_dim"],
]:
    """The keys and values of these pages. A masked weight is 0, but 0 * NaN is NaN, so those that
    no token may see are zeroed."""
    used = visible.any(axis=1)[:, :, None, None]
    keys, values = (gather_pages(pool, page_table) for pool in (key_pages, value_pages))
    return jnp.where(used, keys, 0), jnp.where(used, values, 0)


def scores_of(
    query: Float[Array, "batch kv_heads width group head_dim"],
    keys: Float[Array, "batch positions kv_heads head_dim"],
    visible: Bool[Array, "batch width positions"],
) -> Float[Array, "batch kv_heads width group positions"]:
    """The scaled scores, MASKED for positions that a token may not see."""
    scores = jnp.einsum("shwgd,sphd->shwgp", query, keys, preferred_element_type=jnp.float32)
    return jnp.where(visible[:, None, :, None, :], scores * query.shape[-1] ** -0.5, MASKED)


def gather_pages(
    pages: Float[Array, "pages page_size kv_heads head_dim"],
    page_table: Int[Array, "batch max_pages"],
) -> Float[Array, "batch positions kv_heads head_dim"]:
    batch = page_table.shape[0]
    return pages[page_table].reshape(batch, -1, *pages.shape[2:])


def visible_positions(
    lengths: Int[Array, " batch"],
    counts: Int[Array, " batch"],
    width: int,
    positions: int,
    causal: bool,
    window: int | None,
    window_of_block: bool = False,
    first: int | Int[Array, ""] = 0,
) -> Bool[Array, "batch {width} {positions}"]:
    """Which of so many positions, from the first on, each token of each request may see."""
    key = first + jnp.arange(positions, dtype=lengths.dtype)[None, None, :]
    row = lengths[:, None, None] + jnp.arange(width, dtype=lengths.dtype)[None, :, None]
    last = row if causal else jnp.broadcast_to(row[:, -1:], row.shape)
    visible = (key <= last) & (key < (lengths + counts)[:, None, None])
    if window is None:
        return visible
    if window_of_block:
        return visible & (key >= lengths[:, None, None] - window)
    return visible & ((key > row - window) & (key < row + window))
