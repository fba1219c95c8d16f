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
import operator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

AXIS = "shards"
"""The name of the mesh's axis."""


@dataclasses.dataclass(frozen=True)
class Shards:
    """On how many devices something is cut into shards, and how partial sums are added up."""

    count: int = 1
    in_order: bool = False
    """Whether every sum is added up in the order of the devices. Otherwise the collective chooses
    the order, which may depend on the place of a number in its array."""

    def summed(self, x: Float[Array, "*tokens outputs"]) -> Float[Array, "*tokens outputs"]:
        """The sum over all devices, on each of them."""
        if self.count == 1:
            return x
        if not self.in_order:
            return jax.lax.psum(x, AXIS)
        parts = jax.lax.all_gather(x, AXIS)
        return functools.reduce(operator.add, [parts[i] for i in range(self.count)])

    def largest(self, x: Float[Array, "*tokens outputs"]) -> Float[Array, "*tokens outputs"]:
        """The largest of all devices, number by number, on each of them."""
        return x if self.count == 1 else jax.lax.pmax(x, AXIS)

    def gathered(self, x: Float[Array, "*tokens outputs"]) -> Float[Array, "*tokens vocab"]:
        """The parts of all devices beside each other, on each of them."""
        if self.count == 1:
            return x
        return jax.lax.all_gather(x, AXIS, axis=x.ndim - 1, tiled=True)

    def likeliest(
        self, logits: Float[Array, "batch width outputs"]
    ) -> tuple[Int[Array, "batch width"], Float[Array, "batch width"]]:
        """The likeliest token of the vocabulary of which every device has a part, the first one if
        several are equally likely, and its logit, which is NaN if any is. A device sends two
        numbers per token."""
        here = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        largest = jnp.take_along_axis(logits, here[..., None], axis=-1)[..., 0]
        tokens = jax.lax.all_gather(here + self.first(logits.shape[-1]), AXIS)
        values = jax.lax.all_gather(largest, AXIS)
        best = jnp.argmax(values, axis=0)[None]
        chosen = [jnp.take_along_axis(x, best, axis=0)[0] for x in (tokens, values)]
        return chosen[0], chosen[1]

    def first(self, size: int) -> Int[Array, ""]:
        """Where the part of this device begins, if every part has this size."""
        return (jax.lax.axis_index(AXIS) * size).astype(jnp.int32)


WHOLE = Shards()
"""One device, which holds everything."""
