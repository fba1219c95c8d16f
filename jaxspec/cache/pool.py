"""The pools of key and value pages of one model."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

Pages = Float[Array, "pages page_size kv_heads head_dim"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVPool:
    """Key and value pages of every layer. A step takes it donated and returns its successor.

    Write first, then attend on the returned pages: a second use of the pages from before the
    write would make XLA copy the whole pool.
    """

    keys: tuple[Pages, ...]
    """Per layer, rotated and normed keys."""
    values: tuple[Pages, ...]
    """Per layer, values."""

    @property
    def page_size(self) -> int:
        return self.keys[0].shape[1]

    @property
    def num_pages(self) -> int:
        return self.keys[0].shape[0]


def empty_pool(
    num_layers: int,
    num_pages: int,
    page_size: int,
    kv_heads: int,
    head_dim: int,
    dtype: DTypeLike,
) -> KVPool:
    """A pool of zeroed pages."""
    shape = (num_pages, page_size, kv_heads, head_dim)
    return KVPool(
        keys=tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
        values=tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
    )
