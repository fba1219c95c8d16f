"""Which device has which part of each parameter.

In an array that is cut, the devices' parts follow one after the other, so that each device's part
is a contiguous range. In a fused matrix this order differs from that of the whole matrix:

    whole           q0 q1 q2 q3 | k0 k1 | v0 v1
    on two devices  q0 q1 | k0 | v0        q2 q3 | k1 | v1
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped

from jaxspec.layers.axes import Axes, sections_of, shard_of, size_of
from jaxspec.layers.decoder import Decoder
from jaxspec.layers.shards import AXIS, Shards
from jaxspec.models.parameters import Params, Touchable, parameter_axes


@runtime_checkable
class Shardable(Protocol):
    """A model, or a proposer, that can be cut into shards."""

    def with_shards[Itself](self: Itself, shards: Shards) -> Itself:
        """The same model or proposer, for one device's shard."""
        ...


@functools.cache
def mesh_of(count: int) -> Mesh:
    """The mesh of the first `count` devices of all processes that run together."""
    return Mesh(np.array(jax.devices()[:count]), (AXIS,))


def everywhere(count: int) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh_of(count), PartitionSpec())


def place_of_uploads(count: int) -> NamedSharding | None:
    """Where an array is put that every device reads whole. If it lay on one of them, every program
    that reads it would copy it to the others again. None if there is one device or if there are
    several processes, which would wait for each other to agree on every upload."""
    return None if count == 1 or jax.process_count() > 1 else everywhere(count)


@dataclasses.dataclass(frozen=True)
class Placement:
    """How one parameter is spread over the devices."""

    axes: Axes
    """The axes of one device's shard."""
    count: int
    """Number of devices."""

    @property
    def dimension(self) -> int | None:
        """The dimension that is cut; None if every device has the whole parameter."""
        cut = [i for i, axis in enumerate(self.axes) if _is_cut(axis)]
        assert len(cut) <= 1, "a parameter is cut along one dimension"
        return cut[0] if cut else None

    @property
    def sharding(self) -> NamedSharding:
        if self.dimension is None:
            return everywhere(self.count)
        spec = PartitionSpec(*[None] * self.dimension, AXIS)
        return NamedSharding(mesh_of(self.count), spec)

    @property
    def devices(self) -> list[tuple[int, Any]]:
        """This process's devices, each with the index of its shard."""
        here = jax.process_index()
        all_devices = enumerate(mesh_of(self.count).devices.flat)
        return [(i, device) for i, device in all_devices if device.process_index == here]

    @property
    def whole_axes(self) -> Axes:
        return tuple(tuple(one.whole for one in sections_of(axis)) for axis in self.axes)

    def ranges(self, index: int) -> list[tuple[int, int]]:
        """The part of the cut dimension that device `index` has: (begin, end) of every section."""
        assert self.dimension is not None, "only a parameter that is cut has ranges"
        ranges, start = [], 0
        for section in sections_of(self.axes[self.dimension]):
            begin = start + index * section.size
            ranges.append((begin, begin + section.size))
            start += section.whole.size
        return ranges

    def placed(self, array: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """A whole parameter spread over the devices; unchanged if it is spread already."""
        if getattr(array, "sharding", None) == self.sharding:
            return array
        # Not one `device_put` for all devices, in which processes would wait for each other.
        part = lambda i: array if self.dimension is None else self._shard(array, i)
        return self.joined([jax.device_put(part(i), device) for i, device in self.devices])

    def joined(self, shards: Sequence[Shaped[Array, "..."]]) -> Shaped[Array, "..."]:
        """One array made of this process's shards, each of which is already on its device."""
        shape = tuple(size_of(sections_of(axis)) for axis in self.whole_axes)
        return jax.make_array_from_single_device_arrays(shape, self.sharding, [*shards])

    def by_section(self, array: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """The parameter, cut section by section, from an array that is spread over the devices but
        was cut as if it had one section."""
        if self.dimension is None or len(sections_of(self.axes[self.dimension])) == 1:
            return array
        moved = jax.jit(self._in_order_of_devices, out_shardings=self.sharding)
        return moved(array)

    def _in_order_of_devices(self, array: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        assert self.dimension is not None, "only a parameter that is cut has an order"
        shards = [self._shard(array, index) for index in range(self.count)]
        return jnp.concatenate(shards, axis=self.dimension)

    def _shard(self, array: Shaped[Array, "..."], index: int) -> Shaped[Array, "..."]:
        assert self.dimension is not None, "only a parameter that is cut has shards"
        names = {one.name for one in sections_of(self.axes[self.dimension])}
        return shard_of(array, self.whole_axes, names, index, self.count)


def _is_cut(axis: Any) -> bool:
    return any(section.shards.count > 1 for section in sections_of(axis))


def placements(model: Touchable, shards: Shards) -> dict[str, Placement]:
    """The placement of every parameter, by its path, of a model made by `with_shards`."""
    axes = parameter_axes(model)
    return {path: Placement(of_path, shards.count) for path, of_path in axes.items()}


def placed(params: Params, where: Mapping[str, Placement]) -> Params:
    """Parameters spread over the devices, one after the other. Those that shards do not have, as
    copied heads, are left out."""
    flat: dict[str, Any] = flatten_dict(params, sep="/")
    spread = {path: where[path].placed(flat[path]) for path in flat if path in where}
    return unflatten_dict(spread, sep="/")


def in_sections(params: Params, where: Mapping[str, Placement]) -> Params:
    """Parameters cut section by section, one after the other, from ones that are spread over the
    devices but were cut as if none was fused."""
    flat: dict[str, Any] = flatten_dict(params, sep="/")
    return unflatten_dict({path: where[path].by_section(flat[path]) for path in flat}, sep="/")


def cut_sizes(config: Any) -> dict[str, int]:
    """The sizes of a whole model that sharding divides, by their names in config.json."""
    decoder = config.decoder
    sizes = {
        "num_attention_heads": decoder.num_heads,
        "num_key_value_heads": decoder.num_kv_heads,
        "intermediate_size": decoder.intermediate_size,
        "vocab_size": config.vocab_size,
    }
    if (delta := getattr(config, "delta", None)) is not None:
        sizes["linear_num_key_heads"] = delta.key_heads
        sizes["linear_num_value_heads"] = delta.value_heads
    reduced = getattr(config, "draft_vocab_size", None)
    return sizes if reduced is None else sizes | {"draft_vocab_size": reduced}


def block_sides(decoder: Decoder) -> dict[str, int]:
    """The matrix sides of a whole decoder that sharding divides, by their names in config.json."""
    return {
        "intermediate_size": decoder.intermediate_size,
        "num_attention_heads * head_dim": decoder.num_heads * decoder.head_dim,
        "num_key_value_heads * head_dim": decoder.num_kv_heads * decoder.head_dim,
    }


def spread_over(array: Any) -> int | None:
    """Over how many devices a parameter is spread; None if it is not spread."""
    sharding = getattr(array, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.axis_names != (AXIS,):
        return None
    return sharding.mesh.size


def on_one_device(tree: Any) -> Any:
    """For every array in a tree, the shape of the part that one device has."""

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(leaf, "sharding", None)
        own = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
        return jax.ShapeDtypeStruct(own, leaf.dtype)

    return jax.tree.map(shape, tree)
