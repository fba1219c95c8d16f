"""The keys and values of one layer, in pages."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxspec.cache.block import Block

Pages = Float[Array, "pages page_size kv_heads head_dim"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeysValues:
    """Pages of keys and values. The page table, which maps positions to pages, is in `Block`."""

    keys: Pages
    """Normed and rotated."""
    values: Pages

    in_pages = True

    def commit(self, block: Block) -> "KeysValues":
        """Returns itself: cells that are not kept are overwritten before they are read."""
        return self


def empty_pages(
    num_pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: DTypeLike
) -> KeysValues:
    """Zeroed pages. Keys and values do not share memory, so that both can be donated."""
    shape = (num_pages, page_size, kv_heads, head_dim)
    return KeysValues(keys=jnp.zeros(shape, dtype), values=jnp.zeros(shape, dtype))
