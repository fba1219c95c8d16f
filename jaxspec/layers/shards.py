"""Tensor parallelism inside a step: several devices hold a shard of every matrix each.

Every device runs the same step on its own shards. What lies between the layers (the residual
stream, norms, features, tokens, lengths) is whole on every device, and has equal bits there:

    x --norm--> qkv of my heads --> attention over my heads' pages --> out of my heads --sum--> x
    x --norm--> gate and up of my inner numbers --> down of my inner numbers --sum--> x
    token --> its row if it is mine, else zeros --sum--> x
    x --> logits of my part of the vocabulary --> the best of each device --> the best of all

The functions of this file are the only places where devices exchange something. With one device
each of them returns what it was given, so a step is the same program as without this file.
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
"""No token, and as a float not a number: no result of a step has these bits, which the compiler
does not know."""


def _exchange(collective: Callable[..., Any]) -> Callable[..., Any]:
    """A collective over all devices, with a scope of its own in profiles."""
    return jax.named_scope("exchange")(functools.partial(collective, axis_name=AXIS))


_psum, _pmax, _all_gather = map(_exchange, (jax.lax.psum, jax.lax.pmax, jax.lax.all_gather))


@dataclasses.dataclass(frozen=True)
class Shards:
    """On how many devices something is cut into shards, and how partial sums are added up."""

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
        """The largest of all devices, number by number, on each of them."""
        return x if self.count == 1 else _pmax(x)

    def gathered(self, x: Float[Array, "*tokens outputs"]) -> Float[Array, "*tokens vocab"]:
        """The parts of all devices beside each other, on each of them."""
        if self.count == 1:
            return x
        return _all_gather(x, axis=x.ndim - 1, tiled=True)

    def exchanged(self, *arrays: Shaped[Array, "..."]) -> list[Shaped[Array, "devices ..."]]:
        """What all devices have of these arrays, along a new first axis. They differ in their last
        axis at most, so that one exchange of bytes does for all of them."""
        sent = [array.view(jnp.uint8) for array in arrays]
        ends = list(itertools.accumulate(each.shape[-1] for each in sent))
        received = _all_gather(jnp.concatenate(sent, axis=-1))
        parts = jnp.split(received, ends[:-1], axis=-1)
        return [part.view(array.dtype) for part, array in zip(parts, arrays, strict=True)]

    def likeliest(
        self, logits: Float[Array, "batch width outputs"]
    ) -> tuple[Int[Array, "batch width"], Float[Array, "batch width"]]:
        """The likeliest token of the vocabulary of which every device has a part, the first one if
        several are equally likely, and its logit, which is NaN if any is. A device sends two
        numbers per token."""
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
        """The numbers at these places of an axis of which every device has a part."""
        own = self.places(ids, x.shape[-1])[..., None]
        found = jnp.take_along_axis(x, own, axis=-1, mode="fill", fill_value=0)
        return self.summed(found[..., 0])

    def places(self, ids: Int[Array, "*tokens"], size: int) -> Int[Array, "*tokens"]:
        """Where ids are in this device's part of an axis, if every part has this size; `size` for
        those of other devices."""
        own = ids - self.first(size)
        return jnp.where((own >= 0) & (own < size), own, size)

    def after(self, x: Shaped[Array, "..."], *earlier: Shaped[Array, "..."]) -> Any:
        """The same numbers, known once earlier results are, whose numbers have 32 bits.

        XLA for CPUs may begin an exchange while the exchanges of a branch or loop before it have
        not begun, unless it needs their results. If devices then begin in different orders, they
        wait for each other for ever. So what follows a branch or loop says that it does.
        """
        if self.count == 1:
            return x
        bits = [jax.lax.bitcast_convert_type(each, jnp.int32) for each in earlier]
        never = functools.reduce(operator.or_, [jnp.any(each == NEVER) for each in bits])
        return jnp.where(never, jnp.zeros_like(x), x)

    def first(self, size: int) -> Int[Array, ""]:
        """Where the part of this device begins, if every part has this size."""
        if self.count == 1:
            return jnp.int32(0)
        return (jax.lax.axis_index(AXIS) * size).astype(jnp.int32)


WHOLE = Shards()
"""One device, which holds everything."""
