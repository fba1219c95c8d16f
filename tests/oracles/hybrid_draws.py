"""Weights of tiny Qwen3.5 models, drawn by their names in a text-only folder."""

import math

import numpy as np

from oracles import draws


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Draws a tensor such that an error in any part is noticed: most decays lie between 0.3 and
    0.99, every tap of a convolution counts, and a norm that does not add one is nearly zero."""
    if name.endswith("A_log"):
        return between(name, shape, math.log(0.03), math.log(1.4))
    if name.endswith("dt_bias"):
        return between(name, shape, -1.2, 0.4)
    if name.endswith("in_proj_a.weight"):
        return (0.3 * draws.weight(name, shape)).astype(np.float32)
    if name.endswith("conv1d.weight"):
        return (draws.uniform(name, shape) * math.sqrt(3.0 / shape[-1])).astype(np.float32)
    drawn = draws.weight(name, shape)
    return drawn - np.float32(1.0) if is_centred(name) else drawn


def is_centred(name: str) -> bool:
    """Whether the tensor is the weight of a norm that multiplies by one plus its weight."""
    return name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")


def between(name: str, shape: tuple[int, ...], low: float, high: float) -> np.ndarray:
    middle, half = (low + high) / 2, (high - low) / 2
    return (middle + half * draws.uniform(name, shape)).astype(np.float32)
