"""Attention of a short block of rows per request over that request's pages."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.paged_attention import reference


def paged_attention(
    query: Float[Array, "slots kv_heads width group head_dim"],
    key_pages: Float[Array, "pages page_size kv_heads head_dim"],
    value_pages: Float[Array, "pages page_size kv_heads head_dim"],
    page_table: Int[Array, "slots max_pages"],
    lengths: Int[Array, " slots"],
    spans: Int[Array, " slots"] | None = None,
    *,
    causal: bool,
    window: int | None = None,
    out_slots: int | None = None,
    implementation: Implementation = "auto",
) -> Float[Array, "out_slots width heads head_dim"]:
    """Attends `width` query rows per slot over the slot's pages.

    Row i of slot s sits at position `lengths[s] + i`; keys and values of all `width` rows are
    already in the pages. Position p of slot s lives in page `page_table[s, p // page_size]`.

        position   0 ........ lengths[s]-1 | lengths[s] ... lengths[s]+width-1
                   context                 | the block
        causal     row i sees the context and block rows 0..i
        full       row i sees the context and the whole block

    Only the first `spans[s]` rows of the block are in the pages (all, if None); nobody sees the
    others, and what comes out for them means nothing.

    The result has `out_slots` slots, if given: what is in those behind the queries' own means
    nothing.

    With `window`, row at position p sees only positions in (p - window, p + window).
    Scores are scaled by head_dim ** -0.5; softmax and sums are float32. Rows of the pool that no
    query row may see are never multiplied: they may hold NaN.

    A row's bits depend on its own position and context only, never on `width`'s other rows, the
    slot, or the other slots, as long as the compiled program is the same.
    """
    implementations = {
        "mosaic": _mosaic,
        "portable": _portable,
        "xla": reference.paged_attention,
    }
    return choose(
        implementation,
        implementations,
        query,
        key_pages,
        value_pages,
        page_table,
        lengths,
        jnp.full_like(lengths, query.shape[2]) if spans is None else spans,
        causal=causal,
        window=window,
        out_slots=query.shape[0] if out_slots is None else out_slots,
    )


def pack_queries(
    query: Float[Array, "slots width heads head_dim"], kv_heads: int
) -> Float[Array, "slots kv_heads width group head_dim"]:
    """Groups the query heads by the key-value head that they share."""
    slots, width, heads, head_dim = query.shape
    grouped = query.reshape(slots, width, kv_heads, heads // kv_heads, head_dim)
    return grouped.transpose(0, 2, 1, 3, 4)


def _mosaic(*arguments: Any, **options: Any) -> Any:
    from pallas_kernels.paged_attention import mosaic  # importing Mosaic GPU takes a second

    return mosaic.paged_attention(*arguments, **options)


def _portable(*arguments: Any, out_slots: int, **options: Any) -> Any:
    from pallas_kernels.paged_attention import portable

    return reference.with_slots(portable.paged_attention(*arguments, **options), out_slots)
