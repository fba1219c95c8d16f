"""`qkv_write` and `paged_attention` in one kernel."""

from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels.attend_and_write import reference
from pallas_kernels.dispatch import Implementation, Op, kernels_run
from pallas_kernels.fp8_product.rounded import RoundedRows, Rounding
from pallas_kernels.refusal import refusal_of


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
    causal: bool,
    window: int | None = None,
    window_of_block: bool = False,
    filled_batch: int | None = None,
    rounding: Rounding | None = None,
    implementation: Implementation = "auto",
) -> tuple[
    Float[Array, "filled width heads head_dim"] | RoundedRows,
    Float[Array, "pages page_size kv_heads head_dim"],
    Float[Array, "pages page_size kv_heads head_dim"],
]:
    """Norms and rotates the heads of a block's tokens, writes their keys and values into the pages,
    and attends over the pages.

    Arguments and results are those of `qkv_write`, with a whole product and with queries, and of
    `paged_attention`. Token i of request r is written to position `lengths[r] + i`, if it is one of
    the first `counts[r]` and its position is in a page; the trash page keeps what it has or gets
    anything. With `filled_batch` the result is padded with undefined requests, and with `rounding`
    it is rounded to 8 bits, as `filled_attention` does both. If the pages are donated, they are
    written in place.
    """
    return ATTEND_AND_WRITE(
        implementation,
        qkv,
        query_norm,
        key_norm,
        cos,
        sin,
        key_pages,
        value_pages,
        page_table,
        lengths,
        counts,
        eps=eps,
        causal=causal,
        window=window,
        window_of_block=window_of_block,
        filled_batch=lengths.shape[0] if filled_batch is None else filled_batch,
        rounding=rounding,
    )


def runs_in_one_kernel(implementation: Implementation, *arguments: Any, **options: Any) -> bool:
    """Whether the kernel does this call. If not, the two ops may still be kernels."""
    if implementation not in ("auto", "mosaic") or not kernels_run(implementation):
        return False
    return refusal_of(_check, *arguments, **options) is None


def _mosaic(*arguments: Any, **options: Any) -> Any:
    from pallas_kernels.attend_and_write import mosaic  # importing Mosaic GPU takes a second

    return mosaic.attend_and_write(*arguments, **options)


def _check(*arguments: Any, **options: Any) -> None:
    from pallas_kernels.attend_and_write import mosaic

    mosaic.plan_of(*arguments, **options)


ATTEND_AND_WRITE = Op(
    "attend_and_write",
    {"mosaic": _mosaic, "xla": reference.attend_and_write},
    {"mosaic": _check},
)
