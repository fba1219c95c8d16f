"""`add_norm` in plain JAX: the specification."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.fp8_product.rounded import RoundedRows, Rounding, rounded_rows


def add_norm(
    x: Float[Array, "*tokens hidden"],
    addend: Float[Array, "parts *tokens hidden"],
    scale: Float[Array, " hidden"],
    *,
    eps: float,
    rounding: Rounding | None = None,
) -> tuple[Float[Array, "*tokens hidden"], Float[Array, "*tokens hidden"] | RoundedRows]:
    total = added(x, addend)
    normed = rms_norm(total, scale, eps=eps)
    return total, normed if rounding is None else rounded_rows(normed, rounding)


def added(
    x: Float[Array, "*tokens hidden"], addend: Float[Array, "parts *tokens hidden"]
) -> Float[Array, "*tokens hidden"]:
    return x + addend.astype(jnp.float32).sum(axis=0).astype(x.dtype)


def rms_norm(
    x: Float[Array, "*tokens hidden"], scale: Float[Array, " hidden"], *, eps: float
) -> Float[Array, "*tokens hidden"]:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale.astype(jnp.float32)).astype(x.dtype)
