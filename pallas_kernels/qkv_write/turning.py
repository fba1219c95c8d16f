"""Norms and rotates heads in registers. The two halves of a head are rotated together."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.jax_internals import pl
from pallas_kernels.tiles import load


def halves(ref, dim: int, layout):
    """The first and the second half of heads that are the last axis of an array."""
    return tuple(load(ref.at[..., pl.ds(i * dim // 2, dim // 2)], layout) for i in range(2))


def norm_and_rotate(heads, scales, cos, sin, eps: float) -> tuple:
    """Norms and rotates both halves of heads [rows, half]. `scales` are the halves of the norm's
    scale, for each row or for all of them; `cos` and `sin` are [rows, half]."""
    x1, x2 = (half.astype(jnp.float32) for half in heads)
    scale1, scale2 = (for_all_rows(scale, x1.shape) for scale in scales)
    mean = (x1 * x1 + x2 * x2).sum(axis=1) * (1.0 / (2 * x1.shape[1]))
    inverse = lax.broadcast_in_dim(lax.rsqrt(mean + eps), x1.shape, [0])
    n1, n2 = x1 * inverse * scale1, x2 * inverse * scale2
    return n1 * cos - n2 * sin, n2 * cos + n1 * sin


def for_all_rows(columns, shape):
    wide = columns.astype(jnp.float32)
    return wide if wide.ndim == len(shape) else lax.broadcast_in_dim(wide, shape, [1])
