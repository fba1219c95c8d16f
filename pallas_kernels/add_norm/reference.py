"""`add_norm` in plain JAX: the specification."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def add_norm(
    x: Float[Array, "*rows hidden"],
    addend: Float[Array, "parts *rows hidden"],
    scale: Float[Array, " hidden"],
    *,
    eps: float,
) -> tuple[Float[Array, "*rows hidden"], Float[Array, "*rows hidden"]]:
    total = x + addend.astype(jnp.float32).sum(axis=0).astype(x.dtype)
    wide = total.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return total, (wide * scale.astype(jnp.float32)).astype(x.dtype)
