"""Rotary position embedding, plain and YaRN: cos and sin of positions."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Yarn:
    """YaRN context extension, with the parameter names of Hugging Face configs."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Whether the ramp between the two frequency bands starts and ends at whole dimensions."""
    attention_factor: float | None = None
    """Factor on cos and sin; None means 0.1 * ln(factor) + 1."""


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embedding of one model."""

    theta: float
    yarn: Yarn | None = None
    rotated: int | None = None
    """Dimensions of a head that are rotated; None for all. The other pairs of dimensions, which
    come last in each half of a head, are not rotated."""


Rotation = tuple[Float[Array, "batch width half"], Float[Array, "batch width half"]]
"""Cos and sin of every token's position."""


def rotation(rope: Rope, head_dim: int, positions: Int[Array, "batch width"]) -> Rotation:
    """Float32 cos and sin for the rotate-half convention."""
    frequencies, magnitude = frequencies_of(rope, head_dim)
    angles = positions.astype(jnp.float32)[..., None] * jnp.asarray(frequencies)
    return jnp.cos(angles) * magnitude, jnp.sin(angles) * magnitude


def frequencies_of(rope: Rope, head_dim: int) -> tuple[Float[np.ndarray, " half"], float]:
    """Radians per position of every pair of dimensions, and the factor on cos and sin."""
    if rope.rotated is not None:
        assert rope.yarn is None, "YaRN stretches all dimensions"
        return _of_some(rope, head_dim), 1.0
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = 1.0 / np.float32(rope.theta) ** exponents
    if rope.yarn is None:
        return frequencies, 1.0
    return _stretched(frequencies, rope.theta, head_dim, rope.yarn), _magnitude(rope.yarn)


def _of_some(rope: Rope, head_dim: int) -> Float[np.ndarray, " half"]:
    """The frequencies of the rotated dimensions, then zeros."""
    frequencies, _ = frequencies_of(Rope(rope.theta), rope.rotated or 0)
    return np.pad(frequencies, (0, head_dim // 2 - frequencies.size))


def _stretched(
    frequencies: Float[np.ndarray, " half"], theta: float, head_dim: int, yarn: Yarn
) -> Float[np.ndarray, " half"]:
    """YaRN's frequencies: those of slow dimensions are interpolated, those of fast ones are kept,
    with a linear ramp in between."""

    def dimension_turning(times: float) -> float:
        """The dimension that makes this number of turns over the original context."""
        wavelength = yarn.original_max_position_embeddings / (times * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    low, high = dimension_turning(yarn.beta_fast), dimension_turning(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high > low else 0.001
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / width, 0, 1)
    return (frequencies / yarn.factor * ramp + frequencies * (1 - ramp)).astype(np.float32)


def _magnitude(yarn: Yarn) -> float:
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    return 0.1 * math.log(yarn.factor) + 1.0 if yarn.factor > 1 else 1.0
