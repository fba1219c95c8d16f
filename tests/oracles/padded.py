"""A small Qwen3.5 and its DFlash drafter, padded to sizes that the kernels take: the same function.

Every axis is padded with zeros. The zeros change the mean of the squares in every norm, and the
factor of the queries, so the scales of norms make up for both. That is exact except for `eps`, and
for factors that are not powers of two.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxspec.engine.setup.opened import Opened
from jaxspec.layers.axes import Axis, Fused, sections_of
from jaxspec.layers.decoder import Decoder
from jaxspec.models.dflash import DFlash
from jaxspec.models.parameters import Params, parameter_axes
from jaxspec.models.qwen35 import Qwen35
from jaxspec.proposers.drafters import proposer_of


class Sizes(NamedTuple):
    hidden: int
    inner: int
    head_dim: int
    kv_heads: int
    """With as many query heads for each as before."""
    delta_dim: int
    """Keys and values of the recurrence."""
    delta_heads: int
    """Key heads of the recurrence. It has as many value heads for each as before."""


FOR_KERNELS = Sizes(
    hidden=1024, inner=512, head_dim=128, kv_heads=16, delta_dim=128, delta_heads=16
)
A_LITTLE = Sizes(hidden=128, inner=160, head_dim=64, kv_heads=2, delta_dim=32, delta_heads=4)
"""Sizes that a CPU computes quickly."""


def padded(pair: Opened, sizes: Sizes) -> Opened:
    target, drafter = pair.models.target, pair.drafter
    assert isinstance(target, Qwen35) and isinstance(drafter, DFlash)
    small = target.config.delta
    # The means of squares become smaller, most of all those of recurrent outputs, which the factor
    # of the queries makes smaller too.
    eps = (small.value_dim / sizes.delta_dim) ** 2
    wide_delta = dataclasses.replace(
        small,
        key_heads=sizes.delta_heads,
        value_heads=sizes.delta_heads * small.value_heads // small.key_heads,
        key_dim=sizes.delta_dim,
        value_dim=sizes.delta_dim,
    )
    of_target = dataclasses.replace(
        target.config, decoder=decoder(target.config.decoder, sizes, eps), delta=wide_delta
    )
    of_drafter = dataclasses.replace(
        drafter.config, decoder=decoder(drafter.config.decoder, sizes, eps)
    )
    wide = Qwen35(of_target, target.capture, target.dtype)
    proposer = proposer_of(of_drafter, drafter.dtype)
    params = {
        "target": padded_params(target, wide, pair.params["target"]),
        "drafter": padded_params(drafter, proposer.drafter, pair.params["drafter"]),
    }
    models = dataclasses.replace(pair.models, target=wide, proposers=(proposer,))
    return dataclasses.replace(pair, models=models, params=params)


def decoder(small: Decoder, sizes: Sizes, eps: float) -> Decoder:
    return dataclasses.replace(
        small,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.inner,
        num_heads=sizes.kv_heads * small.num_heads // small.num_kv_heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        rms_norm_eps=small.rms_norm_eps * eps,
        rope=dataclasses.replace(small.rope, rotated=small.rotated),
    )


def padded_params(small: Qwen35 | DFlash, wide: Qwen35 | DFlash, params: Params) -> Params:
    before, after = parameter_axes(small), parameter_axes(wide)
    leaves: dict[str, Any] = flatten_dict(params, sep="/")
    found = {}
    for path, leaf in leaves.items():
        array = np.asarray(leaf, np.float32)
        for dimension, axes in enumerate(zip(before[path], after[path], strict=True)):
            array = filled(array, dimension, *axes, small.config.decoder, wide.config.decoder)
        # Queries keep the larger norm: the longer head divides the scores by as much.
        if path.endswith("scale") and "q_norm" not in path:
            array = array * math.sqrt(leaf.size / array.size)
        found[path] = jnp.asarray(array, leaf.dtype)
    return unflatten_dict(found, sep="/")


def filled(
    array: np.ndarray,
    dimension: int,
    old: Axis | Fused,
    new: Axis | Fused,
    small: Decoder,
    wide: Decoder,
) -> np.ndarray:
    parts, start = [], 0
    for before, after in zip(sections_of(old), sections_of(new), strict=True):
        part = np.take(array, range(start, start + before.size), axis=dimension)
        old_piece, new_piece = piece_of(before, small), piece_of(after, wide)
        parts.append(filled_section(part, dimension, after.size, old_piece, new_piece))
        start += before.size
    return np.concatenate(parts, axis=dimension)


def piece_of(axis: Axis, decoder: Decoder) -> int:
    """The length of the pieces that zeros belong behind: the halves of heads, which are rotated
    against each other, the heads of a recurrence, and the layers of features."""
    if axis.name in ("heads", "kv_heads", "head_dim"):
        return decoder.head_dim // 2
    if axis.name == "features":
        return decoder.hidden_size
    return axis.unit if axis.unit > 1 else axis.size


def filled_section(
    part: np.ndarray, dimension: int, size: int, old_piece: int, new_piece: int
) -> np.ndarray:
    """Zeros behind each piece, and behind the last one until the section has its size."""
    before, behind = part.shape[:dimension], part.shape[dimension + 1 :]
    apart = part.reshape(*before, -1, old_piece, *behind)
    pieces = with_zeros(apart, dimension + 1, new_piece)
    return with_zeros(pieces.reshape(*before, -1, *behind), dimension, size)


def with_zeros(array: np.ndarray, dimension: int, size: int) -> np.ndarray:
    zeros = [(0, 0)] * array.ndim
    zeros[dimension] = (0, size - array.shape[dimension])
    return np.pad(array, zeros)
