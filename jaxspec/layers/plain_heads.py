"""Query, key and value heads of layers that do not norm their heads, in plain XLA.

The kernel `qkv_write` norms heads before it rotates them, so it is not for these layers.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.cache.keys_values import KeysValues
from jaxspec.layers.rope import Rotation
from pallas_kernels.qkv_write.reference import rotate, write_cells

NOT_NORMED = "the heads are not normed; the kernel norms all heads"


def write_without_norms(
    qkv: Float[Array, "parts filled width fused"],
    rotation: Rotation,
    cells: Int[Array, "batch width"],
    pages: KeysValues,
    queries: bool,
) -> tuple[Float[Array, "batch kv_heads width group head_dim"], KeysValues]:
    """What `qkv_write` does, without its norms."""
    batch, width = cells.shape
    kv_heads, head_dim = pages.keys.shape[2:]
    whole = qkv[:, :batch].astype(jnp.float32).sum(axis=0)
    by_head = whole.reshape(batch, width, -1, head_dim)
    heads = by_head.shape[2] - 2 * kv_heads
    query, key, value = jnp.split(by_head, [heads, heads + kv_heads], axis=2)
    if queries:
        query = rotate(query, *rotation)
    by_group = query.astype(pages.keys.dtype).reshape(
        batch, width, kv_heads, heads // kv_heads, head_dim
    )
    return by_group.transpose(0, 2, 1, 3, 4), KeysValues(
        write_cells(pages.keys, rotate(key, *rotation), cells),
        write_cells(pages.values, value, cells),
    )
