"""How many pages fit: the device's memory less weights and the programs' own temporaries."""

import logging
from collections.abc import Callable

import jax

from jaxspec.engine.step.io import Models
from jaxspec.errors import LoadError
from jaxspec.models.dflash import DFlash
from jaxspec.models.target import Target

log = logging.getLogger("jaxspec")


def bytes_per_page(models: Models, page_size: int) -> int:
    """Of one page in both caches."""
    both = [model for model in (models.target, models.drafter) if model is not None]
    return sum(
        _cache_bytes(model, 2, page_size) - _cache_bytes(model, 1, page_size) for model in both
    )


def _cache_bytes(model: Target | DFlash, num_pages: int, page_size: int) -> int:
    cache = jax.eval_shape(lambda: model.new_cache(1, num_pages, page_size))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))


def free_bytes(memory_fraction: float) -> int | None:
    """What may still be allocated on the device; None where the backend does not say."""
    stats = jax.local_devices()[0].memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return int(memory_fraction * stats["bytes_limit"]) - stats["bytes_in_use"]


def peak_bytes() -> int | None:
    """The most that was ever allocated on the device; None where the backend does not say."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use")


def pages_that_fit(
    free: int, per_page: int, useful: int, temporaries: Callable[[int], int], least: int
) -> int:
    """The most pages, up to `useful`, that leave room for the temporaries of every program.

    `temporaries(num_pages)` compiles the programs for a pool of that many pages and says how much
    memory the greediest takes while it runs. It barely moves with the number of pages, so this
    asks once or twice.
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
