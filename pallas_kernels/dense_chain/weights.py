"""The matrices and norms of one call, as one record."""

from typing import NamedTuple

from jaxtyping import Array, Float

from pallas_kernels.fp8_product import Fp8Matrix


class ChainWeights(NamedTuple):
    """Matrices and norm scales of one call."""

    out: Float[Array, "attended hidden"] | Fp8Matrix
    norm: Float[Array, " hidden"]
    gate_up: Float[Array, "hidden twice_inner"] | Fp8Matrix
    down: Float[Array, "inner hidden"] | Fp8Matrix
    next_norm: Float[Array, " hidden"]
    qkv: Float[Array, "hidden fused"] | Fp8Matrix | None
    """The next layer's qkv matrix; None after the last layer."""
