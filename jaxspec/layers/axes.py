"""Logical axes: the meaning of each axis of a parameter, and how to cut it into shards.

A fused matrix has several sections along one axis, each with a name of its own:

    qkv      [hidden, heads | kv_heads | kv_heads]
    gate_up  [hidden, inner | inner]

A shard of it has a share of every section, so the sections are cut one by one and joined again:

    whole        q0 q1 q2 q3 | k0 k1 | v0 v1
    shard 0 of 2 q0 q1       | k0    | v0
    shard 1 of 2       q2 q3 |    k1 |    v1
"""

import dataclasses
from collections.abc import Collection

import jax.numpy as jnp
from jaxtyping import Array, Shaped

from jaxspec.layers.shards import WHOLE, Shards


@dataclasses.dataclass(frozen=True)
class Axis:
    """One axis of a parameter, or one section of a fused axis."""

    name: str
    """hidden, heads, kv_heads, head_dim, inner, features, rank, vocab or draft_vocab; key_heads,
    value_heads and value_dim of recurrent mixers; sides, taps and channel_groups of convolutions;
    all_inputs of scales. An axis of scales of blocks has the name of the axis that it scales."""
    size: int
    unit: int = 1
    """Number of neighbours that stay together, for example the head_dim numbers of one head."""
    shards: Shards = WHOLE
    """Over how many devices it is cut. `size` is the size of one device's part."""

    @property
    def whole(self) -> "Axis":
        """The axis with the parts of all devices."""
        return Axis(self.name, self.size * self.shards.count, self.unit)

    def cut(self, shards: Shards) -> "Axis":
        """One device's part of a whole axis."""
        return dataclasses.replace(self, size=self.size // shards.count, shards=shards)


Fused = tuple[Axis, ...]
"""Sections that follow each other along one axis of an array."""
Axes = tuple[Axis | Fused, ...]
"""Every axis of one parameter."""


def sections_of(axis: Axis | Fused) -> Fused:
    return (axis,) if isinstance(axis, Axis) else axis


def size_of(axis: Axis | Fused) -> int:
    return sum(section.size for section in sections_of(axis))


def shard_of(
    array: Shaped[Array, "..."],
    axes: Axes,
    cut: Collection[str],
    index: int,
    shards: int,
    block: int = 1,
) -> Shaped[Array, "..."]:
    """Shard `index` of `shards` of a parameter. Every section named in `cut` is cut by its own
    size.

    With `block`, the array holds the scales of a quantised parameter, one per `block` numbers of a
    section along each axis. Each scale goes to the shard of the numbers that it scales.
    """
    for dimension, axis in enumerate(axes):
        parts, start = [], 0
        for section in sections_of(axis):
            whole = -(-section.size // block)
            first, size = 0, whole
            if section.name in cut:
                size = _share(section, shards, block)
                first = index * size
            parts.append(_range(array, dimension, start + first, size))
            start += whole
        array = jnp.concatenate(parts, axis=dimension) if len(parts) > 1 else parts[0]
    return array


def _share(section: Axis, shards: int, block: int) -> int:
    if section.size % (shards * section.unit) or section.size // shards % block:
        raise ValueError(
            f"{section.name} has {section.size} numbers in units of {section.unit} and blocks of "
            f"{block}; expected whole units and blocks for each of {shards} shards"
        )
    return section.size // shards // block


def _range(
    array: Shaped[Array, "..."], dimension: int, start: int, size: int
) -> Shaped[Array, "..."]:
    return array[(slice(None),) * dimension + (slice(start, start + size),)]
