"""How many pages fit into the device's memory beside the weights and the programs' temporaries."""

import logging
from typing import Any

import jax
from jax.tree_util import DictKey

from jaxspec.engine.setup.processes import least_of_processes
from jaxspec.errors import LoadError
from jaxspec.layers.fp8 import is_fp8_matrix
from jaxspec.models.copied_head import NAME as COPIED_HEAD
from jaxspec.models.qwen35 import Qwen35
from pallas_kernels.fp8_product import bytes_of_products

log = logging.getLogger("jaxspec")


def free_bytes(memory_fraction: float, num_devices: int = 1) -> int | None:
    """Bytes that may still be allocated on each of the first devices; None if the backend does not
    report it."""
    of_devices = [device.memory_stats() for device in jax.local_devices()[:num_devices]]
    if not all(stats and "bytes_limit" in stats for stats in of_devices):
        return None
    return least_of_processes(
        min(
            int(memory_fraction * stats["bytes_limit"]) - stats["bytes_in_use"]
            for stats in of_devices
        )
    )


def peak_bytes() -> int | None:
    """The most bytes that were ever allocated on the device; None if the backend does not report
    it."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use")


def pages_that_fit(free: int, per_page: int, useful: int, temporaries: int, least: int) -> int:
    """The most pages, up to `useful`, that leave room for the temporaries of a program."""
    pages = min(useful, (free - temporaries) // per_page)
    if pages >= least:
        log.info("pool of %d pages, %.2f GiB for temporaries", pages, temporaries / 2**30)
        return pages
    raise LoadError(
        f"{max(pages, 0)} pages of key-value memory fit in the {free / 2**30:.1f} GiB left beside "
        f"the weights, but one request needs {least}; lower max_model_len or max_batch, or raise "
        "memory_fraction or the environment variable XLA_CLIENT_MEM_FRACTION"
    )


def temporary_bytes(
    params: Any, vocab_size: int, rows: int, logit_rows: int, draws: bool, kept: int = 0
) -> int:
    """Bytes that a step over `rows` tokens may need beside its arguments: an upper estimate, for
    which no program has to be compiled.

    A layer's intermediate results have the sizes of the matrices' sides. If requests draw, the
    logits of `logit_rows` tokens are sorted in float32, with their indices, for target and drafter.
    `kept` is what all layers together keep of the tokens (`bytes_until_commit`).
    """
    leaves = jax.tree.leaves(params)
    sizes = {size for leaf in leaves for size in leaf.shape} - {vocab_size}
    bytes_of_number = max(leaf.dtype.itemsize for leaf in leaves)
    hidden = 2 * rows * sum(sizes) * bytes_of_number
    copies_of_logits = 7 if draws else 1
    logits = copies_of_logits * 4 * logit_rows * vocab_size
    return hidden + logits + _bytes_of_pieces(params, rows) + kept


def bytes_until_commit(target: Any, batch: int, width: int) -> int:
    """Bytes that the recurrent layers of a target keep, from reading a block of `width` tokens for
    each request until it is known which tokens are accepted; 0 if there are no such layers."""
    return target.bytes_until_commit(batch, width) if isinstance(target, Qwen35) else 0


def _bytes_of_pieces(params: Any, rows: int) -> int:
    """Bytes of the partial products that XLA writes before it adds them up, for 8-bit matrices.
    Copied heads have none: on a GPU, XLA does not multiply them."""
    nodes = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_fp8_matrix)
    return max(
        (
            bytes_of_products(rows, *node["weight"].shape[:1], *node["scales"].shape[1:])
            for path, node in nodes
            if is_fp8_matrix(node) and path[-1:] != (DictKey(COPIED_HEAD),)
        ),
        default=0,
    )
