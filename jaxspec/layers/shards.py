"""Tensor parallelism inside a step: each of several devices holds a shard of every matrix.

Every device runs the same step on its own shards. What lies between the layers (the residual
stream, norms, features, tokens, lengths) is whole on every device, and has equal bits there:

    x --norm--> qkv of own heads --> attention over own heads' pages --> out of own heads --sum--> x
    x --norm--> gate and up of own inner numbers --> down of own inner numbers --sum--> x
    token --> its row, which every device has --> x
    if the embedding is also the head:
    token --> its row if this device has it, else zeros --sum--> x
    x --> logits of own part of the vocabulary --> the best of each device --> the best of all

Devices exchange numbers only in the functions of this file and in `jaxspec.layers.exchanged`. With
one device each function here returns what it was given, so that the step is the same program as
without this file.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from jaxspec.layers.exchange import Exchange

AXIS = "shards"
"""The name of the mesh's axis."""
NEVER = 0x7FABCDEF
"""Bits that no result of a step has: as an integer they are no token's id, as a float they are a
NaN. The compiler does not know this."""


def _exchange(collective: Callable[..., Any]) -> Callable[..., Any]:
    """A collective over all devices, with a scope of its own in profiles."""
    return jax.named_scope("exchange")(functools.partial(collective, axis_name=AXIS))


_psum, _pmax, _all_gather = map(_exchange, (jax.lax.psum, jax.lax.pmax, jax.lax.all_gather))


@dataclasses.dataclass(frozen=True)
class Shards:
    """Over how many devices something is sharded, and how partial sums are added up."""

    count: int = 1
    in_order: bool = False
    """Whether every sum is added up in the order of the devices. Otherwise the collective chooses
    the order, which may depend on the place of a number in its array."""
    exchange: Exchange = "psum"
    """What adds up the products of layers, with the residual sum and the norm after it."""

    def summed(self, x: Float[Array, "*tokens outputs"]) -> Float[Array, "*tokens outputs"]:
        """The sum over all devices, on each of them."""
        if self.count == 1:
            return x
        if not self.in_order:
            return _psum(x)
        parts = _all_gather(x)
        return functools.reduce(operator.add, [parts[i] for i in range(self.count)])

    def largest(self, x: Float[Array, "*tokens outputs"]) -> Float[Array, "*tokens outputs"]:
        """The elementwise maximum over all devices, on each of them."""
        return x if self.count == 1 else _pmax(x)

    def gathered(self, x: Float[Array, "*tokens outputs"]) -> Float[Array, "*tokens vocab"]:
        """The parts of all devices beside each other, on each of them."""
        if self.count == 1:
            return x
        return _all_gather(x, axis=x.ndim - 1, tiled=True)

    def exchanged(self, *arrays: Shaped[Array, "..."]) -> list[Shaped[Array, "devices ..."]]:
        """These arrays of all devices, along a new first axis. The arrays may have different last
        axes, but no other differences in shape, so that their bytes are sent in one exchange."""
        sent = [array.view(jnp.uint8) for array in arrays]
        ends = list(itertools.accumulate(each.shape[-1] for each in sent))
        received = _all_gather(jnp.concatenate(sent, axis=-1))
        parts = jnp.split(received, ends[:-1], axis=-1)
        return [part.view(array.dtype) for part, array in zip(parts, arrays, strict=True)]

    def likeliest(
        self, logits: Float[Array, "batch width outputs"]
    ) -> tuple[Int[Array, "batch width"], Float[Array, "batch width"]]:
        """The likeliest token of the vocabulary, of which every device has a part, and its logit.
        Of equally likely tokens it is the first. The logit is NaN if any logit is. A device sends
        two numbers per token."""
        here = jnp.argmax(logits, axis=-1).astype(jnp.int32)[..., None]
        largest = jnp.take_along_axis(logits, here, axis=-1)
        if self.count == 1:
            return here[..., 0], largest[..., 0]
        tokens, values = self.exchanged(here + self.first(logits.shape[-1]), largest)
        best = jnp.argmax(values, axis=0)[None]
        chosen = [jnp.take_along_axis(x, best, axis=0)[0, ..., 0] for x in (tokens, values)]
        return chosen[0], chosen[1]

    def at(
        self, x: Float[Array, "batch width outputs"], ids: Int[Array, "batch width"]
    ) -> Float[Array, "batch width"]:
        """The numbers at these places of the last axis, of which every device has a part."""
        own = self.places(ids, x.shape[-1])[..., None]
        found = jnp.take_along_axis(x, own, axis=-1, mode="fill", fill_value=0)
        return self.summed(found[..., 0])

    def places(self, ids: Int[Array, "*tokens"], size: int) -> Int[Array, "*tokens"]:
        """The places of ids in this device's part of an axis, if every part has this size; `size`
        for ids in the parts of other devices."""
        own = ids - self.first(size)
        return jnp.where((own >= 0) & (own < size), own, size)

    def after(self, x: Shaped[Array, "..."], *earlier: Shaped[Array, "..."]) -> Any:
        """`x` unchanged, but computed only after these earlier results, whose numbers have 32 bits.

        XLA for CPUs may begin an exchange before those of an earlier branch or loop, unless it
        needs their results. If devices begin exchanges in different orders, they wait for each
        other for ever. So what follows a branch or loop is made to depend on it.
        """
        if self.count == 1:
            return x
        bits = [jax.lax.bitcast_convert_type(each, jnp.int32) for each in earlier]
        never = functools.reduce(operator.or_, [jnp.any(each == NEVER) for each in bits])
        return jnp.where(never, jnp.zeros_like(x), x)

    def first(self, size: int) -> Int[Array, ""]:
        """The place where this device's part of an axis begins, if every part has this size."""
        if self.count == 1:
            return jnp.int32(0)
        return (jax.lax.axis_index(AXIS) * size).astype(jnp.int32)


WHOLE = Shards()
"""One device, which holds everything."""
