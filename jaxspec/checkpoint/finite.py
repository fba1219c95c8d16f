"""Finds weights that are not finite, at little cost: a model with one NaN repeats one token for
ever.

    sign exponent fraction      of a float; without the sign, the bits grow with the magnitude, and
    0    1111..   ........      are largest for infinity and NaN

So on a CPU one pass of integer operations finds the largest magnitude. An accelerator computes
`isfinite` of all numbers in the time that it takes to read them.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Shaped

PIECE = 2**17
"""Numbers that are looked at together, so that they stay in the processor's cache."""


def is_finite(weights: Float[Array, "..."]) -> bool:
    """Whether no number is NaN or infinite."""
    if jax.default_backend() != "cpu":
        return bool(_all_finite(weights))
    values = np.asarray(weights)
    largest = _largest_magnitude(values.reshape(-1))
    return bool(np.isfinite(largest.astype(np.float32)))


def count_not_finite(values: Shaped[np.ndarray, "..."]) -> int:
    """How many numbers are NaN or infinite."""
    return int(np.count_nonzero(~np.isfinite(values.astype(np.float32))))


@jax.jit
def _all_finite(weights: Float[Array, "..."]) -> Bool[Array, ""]:
    return jnp.isfinite(weights).all()


def _largest_magnitude(values: Shaped[np.ndarray, " items"]) -> Shaped[np.ndarray, ""]:
    """The number with the largest bits, its sign left out."""
    kind = np.dtype(f"u{values.dtype.itemsize}")
    without_sign = kind.type(np.iinfo(kind).max >> 1)
    bits, scratch, largest = values.view(kind), np.empty(PIECE, kind), kind.type(0)
    for start in range(0, len(bits), PIECE):
        piece = bits[start : start + PIECE]
        magnitudes = np.bitwise_and(piece, without_sign, out=scratch[: len(piece)])
        largest = max(largest, magnitudes.max())
    return np.array(largest, kind).view(values.dtype)
