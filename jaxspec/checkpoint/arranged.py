"""Parameters whose numbers differ in order or in value from those in the files."""

import functools
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

Shape = tuple[int, ...]


@runtime_checkable
class Arranged(Protocol):
    """How a parameter is made of the stored tensor, before it is transposed and cast. It works with
    numpy and JAX arrays."""

    def __call__(self, stored: Any) -> Any: ...

    def shape(self, stored: Shape) -> Shape:
        """The shape of the result."""
        ...

    def stored(self, parameter: Any) -> Any:
        """The inverse: the stored tensor that a parameter is made of."""
        ...


class Reordered:
    """The same rows in another order."""

    @functools.cached_property
    def order(self) -> Int[np.ndarray, " outputs"]:
        """The index of the stored row that each row of the parameter is."""
        return self.find_order()

    def find_order(self) -> Int[np.ndarray, " outputs"]:
        raise NotImplementedError

    def __call__(self, stored: Any) -> Any:
        return stored[self.order]

    def shape(self, stored: Shape) -> Shape:
        return stored

    def stored(self, parameter: Any) -> Any:
        return parameter[np.argsort(self.order)]


@dataclass(frozen=True)
class PartOfRows(Reordered):
    """A device's part of reordered rows, made of its own stored rows in the order of the files."""

    whole: Reordered
    ranges: tuple[tuple[int, int], ...]
    """The parameter's rows that the device has: (begin, end) of each range."""

    @functools.cached_property
    def stored_rows(self) -> Int[np.ndarray, " outputs"]:
        """The stored rows that the part is made of, in the order of the files."""
        return np.sort(self._own)

    def find_order(self) -> Int[np.ndarray, " outputs"]:
        return np.searchsorted(self.stored_rows, self._own)

    @property
    def _own(self) -> Int[np.ndarray, " outputs"]:
        return np.concatenate([self.whole.order[begin:end] for begin, end in self.ranges])


@dataclass(frozen=True)
class HeadOrder(Reordered):
    """The dimensions of a head in which only the first ones are rotated, in pairs of one from their
    first half and one from their second:

        stored    r r r r | s s s s | rest                      r is rotated with s
        ours      r r r r, half of the rest | s s s s, the rest

    Each dimension of one half of a head then has its partner in the other, as if all were rotated.
    """

    head_dim: int
    rotated: int

    def find_order(self) -> Int[np.ndarray, " head_dim"]:
        turned, left = self.rotated // 2, (self.head_dim - self.rotated) // 2
        first, second = np.arange(turned), turned + np.arange(turned)
        rest = self.rotated + np.arange(2 * left)
        return np.concatenate([first, rest[:left], second, rest[left:]])


@dataclass(frozen=True)
class GatedHeads(Reordered):
    """Queries, gates, keys and values. In the files, each head's gates come after its queries:

    stored    q0 g0 q1 g1 ... | k0 k1 | v0 v1
    ours      q0 q1 ... | k0 k1 | v0 v1 | g0 g1 ...     and q and k in `HeadOrder`
    """

    heads: int
    kv_heads: int
    order_of_head: HeadOrder

    def find_order(self) -> Int[np.ndarray, " outputs"]:
        head_dim, turned = self.order_of_head.head_dim, self.order_of_head.order
        plain = np.arange(head_dim)
        keys = 2 * self.heads * head_dim
        values = keys + self.kv_heads * head_dim
        heads = lambda start, step, count, order: (
            start + step * np.arange(count)[:, None] + order
        ).reshape(-1)
        return np.concatenate(
            [
                heads(0, 2 * head_dim, self.heads, turned),
                heads(keys, head_dim, self.kv_heads, turned),
                heads(values, head_dim, self.kv_heads, plain),
                heads(head_dim, 2 * head_dim, self.heads, plain),
            ]
        )


@dataclass(frozen=True)
class OneMore:
    """The scale of a norm, of which the files store scale - 1."""

    order: HeadOrder | None = None

    def __call__(self, stored: Any) -> Any:
        scale = stored.astype(np.float32) + np.float32(1)
        return scale if self.order is None else self.order(scale)

    def shape(self, stored: Shape) -> Shape:
        return stored

    def stored(self, parameter: Any) -> Any:
        return (parameter if self.order is None else self.order.stored(parameter)) - np.float32(1)


@dataclass(frozen=True)
class Taps:
    """The kernel of a depthwise convolution, which the files store as [channels, 1, taps]."""

    def __call__(self, stored: Any) -> Any:
        return stored[:, 0].T

    def shape(self, stored: Shape) -> Shape:
        channels, _, taps = stored
        return taps, channels

    def stored(self, parameter: Any) -> Any:
        return parameter.T[:, None]
