"""Attention of a block of tokens per request over the keys and values in that request's pages."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Implementation, Op, kernels_meant
from pallas_kernels.fp8_product.rounded import RoundedRows, Rounding
from pallas_kernels.paged_attention import in_pieces, reference


def paged_attention(
    query: Float[Array, "batch kv_heads width group head_dim"],
    key_pages: Float[Array, "pages page_size kv_heads head_dim"],
    value_pages: Float[Array, "pages page_size kv_heads head_dim"],
    page_table: Int[Array, "batch max_pages"],
    lengths: Int[Array, " batch"],
    counts: Int[Array, " batch"] | None = None,
    *,
    causal: bool,
    window: int | None = None,
    window_of_block: bool = False,
    implementation: Implementation = "auto",
) -> Float[Array, "batch width heads head_dim"]:
    """Attends `width` tokens of each request over the request's pages.

    Token i of request r has position `lengths[r] + i`. The pages already hold the keys and values
    of the block's own tokens. Position p of request r is in page `page_table[r, p // page_size]`.

        position   0 ........ lengths[r]-1 | lengths[r] ... lengths[r]+width-1
                   context                 | the block
        causal     token i sees the context and the block's tokens 0..i
        full       token i sees the context and the whole block

    Only the first `counts[r]` tokens of the block are in the pages (all if `counts` is None). No
    token sees the others, whose outputs are undefined.

    With `window`, a token at position p sees only positions in (p - window, p + window). With
    `window_of_block`, all tokens of the block see the positions from lengths[r] - window on.
    Scores are scaled by head_dim ** -0.5; softmax and sums are float32. Cells that no token may
    see do not affect the result: they may hold NaN.

    For one compiled program, the bits of a token's output depend only on the token's position and
    on the keys and values that it sees, never on its place in the batch, on the other requests or
    on the block's other queries.
    """
    result: Any = filled_attention(
        query,
        key_pages,
        value_pages,
        page_table,
        lengths,
        counts,
        causal=causal,
        window=window,
        window_of_block=window_of_block,
        filled_batch=query.shape[0],
        implementation=implementation,
    )
    return result


def filled_attention(
    query: Float[Array, "batch kv_heads width group head_dim"],
    key_pages: Float[Array, "pages page_size kv_heads head_dim"],
    value_pages: Float[Array, "pages page_size kv_heads head_dim"],
    page_table: Int[Array, "batch max_pages"],
    lengths: Int[Array, " batch"],
    counts: Int[Array, " batch"] | None = None,
    *,
    causal: bool,
    window: int | None = None,
    window_of_block: bool = False,
    filled_batch: int,
    rounding: Rounding | None = None,
    implementation: Implementation = "auto",
) -> Float[Array, "filled width heads head_dim"] | RoundedRows:
    """`paged_attention` with a result padded to `filled_batch` requests, because the next kernel
    takes whole tiles. The values of the requests beyond the batch are undefined. With `rounding`,
    the result is rounded to 8 bits for the next product, and the heads of a token are one row."""
    return PAGED_ATTENTION(
        implementation,
        query,
        key_pages,
        value_pages,
        page_table,
        lengths,
        jnp.full_like(lengths, query.shape[2]) if counts is None else counts,
        causal=causal,
        window=window,
        window_of_block=window_of_block,
        filled_batch=filled_batch,
        rounding=rounding,
    )


def rounds_itself(
    query: Float[Array, "batch kv_heads width group head_dim"],
    rounding: Rounding | None,
    implementation: Implementation,
) -> bool:
    """Whether a kernel runs that rounds the result like this while it writes it."""
    if rounding != "pieces" or kernels_meant(implementation) != "mosaic":
        return False
    from pallas_kernels.paged_attention import mosaic

    return mosaic.rounds_itself(query.shape)


def pack_queries(
    query: Float[Array, "batch width heads head_dim"], kv_heads: int
) -> Float[Array, "batch kv_heads width group head_dim"]:
    """Groups the query heads by the key-value head that they share (grouped-query attention)."""
    batch, width, heads, head_dim = query.shape
    grouped = query.reshape(batch, width, kv_heads, heads // kv_heads, head_dim)
    return grouped.transpose(0, 2, 1, 3, 4)


def _mosaic(*arguments: Any, **options: Any) -> Any:
    from pallas_kernels.paged_attention import mosaic  # importing Mosaic GPU takes a second

    return mosaic.paged_attention(*arguments, **options)


def _portable(
    *arguments: Any, filled_batch: int, rounding: Rounding | None = None, **options: Any
) -> Any:
    from pallas_kernels.paged_attention import portable

    attended = portable.paged_attention(*arguments, **options)
    return reference.in_8_bits(reference.filled_up(attended, filled_batch), rounding)


def _check(*arguments: Any, **options: Any) -> None:
    from pallas_kernels.paged_attention import mosaic

    mosaic.plan_of(*arguments, **options)


def _check_portable(
    *arguments: Any, filled_batch: int, rounding: Rounding | None = None, **options: Any
) -> None:
    from pallas_kernels.paged_attention import portable

    portable.call_of(*arguments, **options)


PAGED_ATTENTION = Op(
    "paged_attention",
    {"mosaic": _mosaic, "portable": _portable, "xla": in_pieces.paged_attention},
    {"mosaic": _check, "portable": _check_portable},
)
