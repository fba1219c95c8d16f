"""Head norms, rotary embedding and the write into the pages, between qkv GEMM and attention."""

from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.qkv_write import reference


def qkv_write(
    qkv: Float[Array, "parts more width fused"],
    query_norm: Float[Array, " head_dim"] | None,
    key_norm: Float[Array, " head_dim"],
    cos: Float[Array, "slots width half"],
    sin: Float[Array, "slots width half"],
    pool_rows: Int[Array, "slots width"],
    key_pages: Float[Array, "pages page_size kv_heads head_dim"],
    value_pages: Float[Array, "pages page_size kv_heads head_dim"],
    *,
    eps: float,
    implementation: Implementation = "auto",
) -> tuple[
    Float[Array, "slots kv_heads width group head_dim"],
    Float[Array, "pages page_size kv_heads head_dim"],
    Float[Array, "pages page_size kv_heads head_dim"],
]:
    """Splits fused qkv rows, norms and rotates q and k per head, writes k and v into the pages.

    `qkv` is given as the parts of a matrix product that was split over its inputs, in float32, or
    as one part; they are added, and rounded to the dtype of the pages. Slots behind those of
    `pool_rows` are left alone. It holds the query heads, then the key heads, then the value heads;
    with no query heads (group 0, `query_norm` None) only keys and values are written. `cos` and
    `sin` are float32, rotate-half convention.
    `pool_rows[s, i]` is the flat row `page * page_size + offset` where row i of slot s goes; rows
    that must not be kept point into page 0, the trash page, which several rows may share. Norms and
    rotation are float32.

    Returns the queries packed by key-value head, as `paged_attention` wants them, and the pages,
    which alias the ones given when those are donated.
    """
    implementations = {
        "mosaic": _mosaic,
        "portable": _portable,
        "xla": reference.qkv_write,
    }
    return choose(
        implementation,
        implementations,
        qkv,
        query_norm,
        key_norm,
        cos,
        sin,
        pool_rows,
        key_pages,
        value_pages,
        eps=eps,
    )


def _mosaic(*arguments: Any, **options: Any) -> Any:
    from pallas_kernels.qkv_write import mosaic  # importing Mosaic GPU takes a second

    return mosaic.qkv_write(*arguments, **options)


def _portable(*arguments: Any, **options: Any) -> Any:
    return _mosaic(*arguments, bulk=False, **options)
