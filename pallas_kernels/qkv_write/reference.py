"""The specification of `qkv_write`, in plain XLA."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


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
) -> tuple[
    Float[Array, "batch kv_heads width group head_dim"],
    Float[Array, "pages page_size kv_heads head_dim"],
    Float[Array, "pages page_size kv_heads head_dim"],
]:
    batch, width = cells.shape
    qkv = qkv[:, :batch].astype(jnp.float32).sum(axis=0).astype(key_pages.dtype)
    kv_heads, head_dim = key_pages.shape[2:]
    by_head = qkv.reshape(batch, width, -1, head_dim)
    heads = by_head.shape[2] - 2 * kv_heads
    query, key, value = jnp.split(by_head, [heads, heads + kv_heads], axis=2)

    if query_norm is not None:
        query = rotate(normalize(query, query_norm, eps), cos, sin)
    key = rotate(normalize(key, key_norm, eps), cos, sin)
    query = query.astype(qkv.dtype).reshape(batch, width, kv_heads, heads // kv_heads, head_dim)
    return (
        query.transpose(0, 2, 1, 3, 4),
        write_cells(key_pages, key, cells),
        write_cells(value_pages, value, cells),
    )


def normalize(
    x: Float[Array, "batch width heads head_dim"], scale: Float[Array, " head_dim"], eps: float
) -> Float[Array, "batch width heads head_dim"]:
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * scale


def rotate(
    x: Float[Array, "batch width heads head_dim"],
    cos: Float[Array, "batch width half"],
    sin: Float[Array, "batch width half"],
) -> Float[Array, "batch width heads head_dim"]:
    """Rotary embedding, rotate-half convention: dimensions i and i + half are rotated together."""
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def write_cells(
    pages: Float[Array, "pages page_size kv_heads head_dim"],
    values: Float[Array, "batch width kv_heads head_dim"],
    cells: Int[Array, "batch width"],
) -> Float[Array, "pages page_size kv_heads head_dim"]:
    flat = pages.reshape(-1, *pages.shape[2:])
    values = values.astype(pages.dtype).reshape(-1, *values.shape[2:])
    return flat.at[cells.reshape(-1)].set(values, mode="drop").reshape(pages.shape)
