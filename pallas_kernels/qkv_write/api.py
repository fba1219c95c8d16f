"""Head norms, rotary embedding and the write into the pages, between qkv GEMM and attention."""

from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Implementation, choose
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

    `qkv` is given as the parts of a matrix product that was split over its inputs, in float32, or
    as one part; they are added, and rounded to the dtype of the pages. Requests beyond those of
    `cells`, which fill the batch up for a kernel before this one, are left alone. It holds the
    query heads, then the key heads, then the value heads; with no query heads (group 0,
    `query_norm` None) only keys and values are written. `cos` and `sin` are float32, rotate-half
    convention. Norms and rotation are float32.

    `cells[r, i]` is `page * page_size + offset` of the cell where token i of request r goes; tokens
    that must not be kept go to page 0, the trash page, whose cells several tokens may share.

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
