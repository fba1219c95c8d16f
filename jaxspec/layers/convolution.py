"""Convolutions around a sublayer: each token of a block also sees the tokens just before it.

The kernels depend on the token. From the sublayer's normed input x, one product makes the changes p
of the two kernels, before and after the sublayer; all channels of a group share them:

    x ---- convolve with side 0 ---- sublayer ---- convolve with side 1 ---- added to the stream
    |                 ^                                      ^
    +--- W x = p -----+--------------------------------------+

    convolve(y)[i, c] = sum over taps of (base[tap, c] + p[i, tap, group of c]) * y[i - tap, c]

A block has nothing before its first token, so y is zero there. There are few taps, so this is
computed by shifts, products and sums, which XLA fuses into one pass over y.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key

from jaxspec.layers.axes import Axis
from jaxspec.layers.linear import Linear
from jaxspec.layers.parameter import parameter

SIDES = 2
"""Before the sublayer and after it."""


@dataclasses.dataclass(frozen=True)
class Convolutions:
    """The sizes of the convolutions around every sublayer of a model."""

    taps: int
    """Number of tokens that one output is made of: the token itself and the ones before it."""
    group_size: int
    """Number of neighbouring channels of the residual stream whose kernels change together."""


Changes = Float[Array, "*blocks width taps channel_groups"]
"""What each token adds to the kernel of one side."""
ByBlock = Callable[[Float[Array, "batch tokens outputs"]], Float[Array, "*blocks width outputs"]]
"""Splits the tokens into blocks, with an axis along each block."""
AfterSublayer = Callable[[Float[Array, "batch tokens hidden"]], Float[Array, "batch tokens hidden"]]


class Convolution(nn.Module):
    """The two convolutions of one sublayer."""

    sizes: Convolutions
    hidden: Axis
    dtype: DTypeLike

    def setup(self) -> None:
        taps = Axis("taps", self.sizes.taps)
        groups = Axis("channel_groups", self.hidden.size // self.sizes.group_size)
        axes = Axis("sides", SIDES), taps, self.hidden
        self.base = parameter(self, "base", identity, axes, self.dtype)
        changes = Axis("channel_groups", SIDES * taps.size * groups.size)
        self.projection = Linear(self.hidden, changes, self.dtype)

    def __call__(
        self, normed: Float[Array, "batch tokens hidden"], by_block: ByBlock
    ) -> tuple[Float[Array, "batch tokens hidden"], AfterSublayer]:
        """The sublayer's convolved input, and the function that convolves the sublayer's output."""
        with jax.named_scope("convolution"):
            changes = by_block(self.projection(normed))
            changes = changes.reshape(*changes.shape[:-1], SIDES, self.sizes.taps, -1)

        def convolved(
            side: int, y: Float[Array, "batch tokens hidden"]
        ) -> Float[Array, "batch tokens hidden"]:
            with jax.named_scope("convolution"):
                own = changes[..., side, :, :]
                return convolve(by_block(y), self.base[side], own).reshape(y.shape)

        return convolved(0, normed), partial(convolved, 1)


def identity(key: Key[Array, ""], shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Kernels that leave everything as it is."""
    return jnp.zeros(shape, dtype).at[:, 0].set(1)


def convolve(
    y: Float[Array, "*blocks width hidden"],
    base: Float[Array, "taps hidden"],
    changes: Changes,
) -> Float[Array, "*blocks width hidden"]:
    """The formula at the top of this module, computed in float32 or wider."""
    taps, groups = changes.shape[-2:]
    wide = jnp.promote_types(y.dtype, jnp.float32)
    by_channel = jnp.repeat(changes.astype(wide), y.shape[-1] // groups, axis=-1)
    kernels = base.astype(wide) + by_channel
    terms = [kernels[..., tap, :] * shifted(y.astype(wide), tap) for tap in range(taps)]
    return sum(terms[1:], terms[0]).astype(y.dtype)


def shifted(
    y: Float[Array, "*blocks width hidden"], tap: int
) -> Float[Array, "*blocks width hidden"]:
    """The tokens moved `tap` places later, with zeros before the first."""
    width = y.shape[-2]
    gone = min(tap, width)
    return jax.lax.pad(
        y[..., : width - gone, :],
        jnp.zeros((), y.dtype),
        [(0, 0, 0)] * (y.ndim - 2) + [(gone, 0, 0), (0, 0, 0)],
    )
