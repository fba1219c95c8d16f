"""`silu_gate` in plain JAX: the specification."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.fp8_product.rounded import RoundedRows, Rounding, rounded_rows
from pallas_kernels.split_product import total_of


def silu_gate(
    gate_up: Float[Array, "parts *tokens twice_inner"], *, dtype: DTypeLike, rounding: Rounding
) -> RoundedRows:
    gate, up = jnp.split(total_of(gate_up, dtype), 2, axis=-1)
    return rounded_rows(jax.nn.silu(gate) * up, rounding)
