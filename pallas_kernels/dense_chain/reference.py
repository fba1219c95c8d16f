"""`dense_chain` in plain JAX: the specification."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.add_norm.reference import added, rms_norm
from pallas_kernels.dense_chain.shape import Arrivals
from pallas_kernels.dense_chain.weights import ChainWeights
from pallas_kernels.exchange.inboxes import Inboxes
from pallas_kernels.exchange.reference import exchange_norm
from pallas_kernels.fp8_product import Fp8Matrix, RoundedRows
from pallas_kernels.fp8_product.reference import fp8_product


def dense_chain(
    attended: Float[Array, "tokens attended"] | RoundedRows,
    x: Float[Array, "tokens hidden"],
    out: Float[Array, "attended hidden"] | Fp8Matrix,
    norm: Float[Array, " hidden"],
    gate_up: Float[Array, "hidden twice_inner"] | Fp8Matrix,
    down: Float[Array, "inner hidden"] | Fp8Matrix,
    next_norm: Float[Array, " hidden"],
    qkv: Float[Array, "hidden fused"] | Fp8Matrix | None,
    arrivals: Arrivals,
    *,
    eps: float,
    quantise_inputs: bool = False,
) -> tuple[Float[Array, "tokens hidden"], Float[Array, "tokens fused"] | None, Arrivals]:
    times = functools.partial(product, quantise_inputs=quantise_inputs)
    x = added(x, times(attended, out)[None])
    normed = rms_norm(x, norm, eps=eps)
    gate, up = jnp.split(times(normed, gate_up), 2, axis=-1)
    x = added(x, times(jax.nn.silu(gate) * up, down)[None])
    normed = rms_norm(x, next_norm, eps=eps)
    return x, None if qkv is None else times(normed, qkv), arrivals


def exchanging_chain(
    attended: Float[Array, "tokens attended"],
    x: Float[Array, "tokens hidden"],
    weights: ChainWeights,
    arrivals: Arrivals,
    inboxes: Inboxes,
    *,
    eps: float,
    axis_name: str,
) -> tuple[Float[Array, "tokens hidden"], Float[Array, "tokens fused"] | None, Arrivals, Inboxes]:
    out, norm, gate_up, down, next_norm, qkv = weights
    options = {"eps": eps, "axis_name": axis_name}
    x, normed, inboxes = exchange_norm(x, product(attended, out)[None], norm, inboxes, **options)
    gate, up = jnp.split(product(normed, gate_up), 2, axis=-1)
    part = product(jax.nn.silu(gate) * up, down)
    x, normed, inboxes = exchange_norm(x, part[None], next_norm, inboxes, **options)
    return x, None if qkv is None else product(normed, qkv), arrivals, inboxes


def product(
    x: Float[Array, "tokens inputs"] | RoundedRows,
    matrix: Float[Array, "inputs outputs"] | Fp8Matrix,
    quantise_inputs: bool = False,
) -> Float[Array, "tokens outputs"]:
    if not isinstance(matrix, Fp8Matrix):
        assert not isinstance(x, RoundedRows), "a matrix in 16 bits takes no rows in 8 bits"
        return x @ matrix
    return fp8_product(x, *matrix, quantise_inputs=quantise_inputs)[0]
