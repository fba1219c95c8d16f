"""`dense_chain` in plain JAX: the specification."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.add_norm.reference import add_norm
from pallas_kernels.dense_chain.shape import Arrivals


def dense_chain(
    attended: Float[Array, "tokens attended"],
    x: Float[Array, "tokens hidden"],
    out: Float[Array, "attended hidden"],
    norm: Float[Array, " hidden"],
    gate_up: Float[Array, "hidden twice_inner"],
    down: Float[Array, "inner hidden"],
    next_norm: Float[Array, " hidden"],
    qkv: Float[Array, "hidden fused"] | None,
    arrivals: Arrivals,
    *,
    eps: float,
) -> tuple[Float[Array, "tokens hidden"], Float[Array, "tokens fused"] | None, Arrivals]:
    x, normed = add_norm(x, (attended @ out)[None], norm, eps=eps)
    gate, up = jnp.split(normed @ gate_up, 2, axis=-1)
    x, normed = add_norm(x, ((jax.nn.silu(gate) * up) @ down)[None], next_norm, eps=eps)
    return x, None if qkv is None else normed @ qkv, arrivals
