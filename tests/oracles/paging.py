"""Slots whose pages are scattered over a pool. Everything else in the pool must not be read."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache.cache import Cache
from jaxspec.models.dflash import DFlash
from jaxspec.models.qwen3 import Qwen3

PAGE_SIZE = 4


def scattered_pages(slots: int, positions: int) -> np.ndarray:
    """A page table for `positions` positions per slot, with the pages in random order."""
    per_slot = -(-positions // PAGE_SIZE)
    pages = np.random.PCG64(0).random_raw(slots * per_slot).argsort() + 1
    return pages.astype(np.int32).reshape(slots, per_slot)


def spoiled_cache(model: Qwen3 | DFlash, page_table: np.ndarray, content: float) -> Cache:
    cache = model.new_cache(len(page_table), page_table.size + 1, PAGE_SIZE)
    return jax.tree.map(lambda pages: jnp.full_like(pages, content), cache)


def held_rows(pages: jax.Array, page_table: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Rows [start, stop) of every slot, from the pages of one layer."""
    held = np.asarray(pages)[page_table]
    return held.reshape(len(page_table), -1, *pages.shape[2:])[:, start:stop]
