"""The work between the qkv product and attention: head norms, rotary embedding, cache write."""

from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Implementation, Op
from pallas_kernels.qkv_write import reference


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
    implementation: Implementation = "auto",
) -> tuple[
    Float[Array, "batch kv_heads width group head_dim"],
    Float[Array, "pages page_size kv_heads head_dim"],
    Float[Array, "pages page_size kv_heads head_dim"],
]:
    """Splits fused qkv, norms and rotates q and k per head, writes k and v into the pages.

    A token's fused qkv has the query heads first, then the key heads, then the value heads. Without
    query heads (group 0, `query_norm` None) only keys and values are written.

    `qkv` is either the float32 parts of a matrix product that was split over its inputs
    (`split_product`), or a whole product as one part. The sum of the parts is rounded to the dtype
    of the pages. `qkv` may have more requests than `cells`, because the previous kernel may need
    padding; these are ignored. `cos` and `sin` are float32, for the rotate-half convention. Norms
    and rotation are float32; the norms' scales may be float32 or have the dtype of the pages.

    `cells[r, i]` is the cell for token i of request r: `page * page_size + offset`. Tokens that
    must not be kept go to page 0, the trash page, where several tokens may share a cell.

    Returns the queries packed by key-value head, as `paged_attention` takes them, and the pages. If
    the pages are donated, they are written in place.
    """
    return QKV_WRITE(
        implementation,
        qkv,
        query_norm,
        key_norm,
        cos,
        sin,
        cells,
        key_pages,
        value_pages,
        eps=eps,
    )


def _mosaic(*arguments: Any, **options: Any) -> Any:
    from pallas_kernels.qkv_write import mosaic  # importing Mosaic GPU takes a second

    return mosaic.qkv_write(*arguments, **options)


def _portable(*arguments: Any, **options: Any) -> Any:
    return _mosaic(*arguments, bulk=False, **options)


def _check(*arguments: Any, **options: Any) -> None:
    from pallas_kernels.qkv_write import mosaic

    mosaic.heads_of(*arguments, **options)


def _check_portable(*arguments: Any, **options: Any) -> None:
    _check(*arguments, bulk=False, **options)


QKV_WRITE = Op(
    "qkv_write",
    {"mosaic": _mosaic, "portable": _portable, "xla": reference.qkv_write},
    {"mosaic": _check, "portable": _check_portable},
)
