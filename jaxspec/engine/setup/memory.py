"""How many pages fit into the device's memory beside the weights and the programs' temporaries."""

import logging
from collections.abc import Callable
from typing import Any

import jax

from jaxspec.errors import LoadError

log = logging.getLogger("jaxspec")


def num_bytes(tree: Any) -> int:
    """Bytes of all arrays, or shapes of arrays, in a tree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def free_bytes(memory_fraction: float) -> int | None:
    """Bytes that may still be allocated on the device; None if the backend does not report it."""
    stats = jax.local_devices()[0].memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return int(memory_fraction * stats["bytes_limit"]) - stats["bytes_in_use"]


def peak_bytes() -> int | None:
    """The most bytes that were ever allocated on the device; None if the backend does not report
    it."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use")


def pages_that_fit(
    free: int, per_page: int, useful: int, temporaries: Callable[[int], int], least: int
) -> int:
    """The most pages, up to `useful`, that leave room for the temporaries of every program.

    `temporaries(num_pages)` compiles the programs for a pool of that many pages and returns the
    bytes that the largest of them takes while it runs. This barely depends on the number of pages,
    so one or two calls are enough.
    """
    pages = min(useful, free // per_page)
    for _ in range(3):
        if pages < least:
            break
        needed = temporaries(pages)
        if pages * per_page + needed <= free:
            log.info("pool of %d pages, %.2f GiB of temporaries", pages, needed / 2**30)
            return pages
        pages = (free - needed) // per_page
    raise LoadError(
        f"{max(pages, 0)} pages of key-value memory fit in the {free / 2**30:.1f} GiB left beside "
        f"the weights, one request needs {least}; lower max_model_len or max_batch, or raise "
        "memory_fraction"
    )
