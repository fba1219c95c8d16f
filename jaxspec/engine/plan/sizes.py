"""Refuses sizes that no engine can have, and logs options that have no effect."""

import logging

import jax

from jaxspec.engine.plan.options import EngineOptions
from jaxspec.engine.requests.sampling_params import is_integer
from jaxspec.engine.step.io import Models
from jaxspec.errors import UsageError, shown
from jaxspec.proposers.methods import METHODS

log = logging.getLogger("jaxspec")

SIZES = (
    "max_batch",
    "max_model_len",
    "page_size",
    "num_pages",
    "num_drafts",
    "num_snapshots",
    "prefill_chunk",
    "prefill_budget",
    "prefill_beside_decoding",
    "tensor_parallel_size",
)
"""Options that are sizes of arrays, or numbers of tokens."""
LONGEST_BLOCK = 1024
"""A longer block must fit into the context. No block nearly as long as this pays."""


def check_sizes(options: EngineOptions) -> None:
    """Refuses sizes that no array can have, before anything is made of that size."""
    for name in SIZES:
        size = getattr(options, name)
        if size is not None and not (is_integer(size) and size < 2**31):
            raise UsageError(f"{name} is {shown(size)}; expected an integer below 2**31")


def check_block(models: Models, block_size: int, max_model_len: int) -> None:
    """Refuses blocks that are longer than the context that they would be written to."""
    name = "block_size" if models.proposers else "num_drafts + 1"
    if max_model_len < 1:
        context = min(limits_of(models).values()) + block_size
        raise UsageError(
            f"{name} is {block_size}; expected less than {context}, the positions that the drafter "
            "was made for"
        )
    if block_size > (longest := max(max_model_len, LONGEST_BLOCK)):
        raise UsageError(f"{name} is {block_size}; expected at most {longest}")


def say_what_is_ignored(options: EngineOptions, method: str) -> None:
    """One line in the log for each option that was changed and has no effect."""
    uses = METHODS[method]
    ignored = {
        "adaptive": (
            bool(options.adaptive) and not uses.drafter,
            "there is no drafter whose width could be chosen",
        ),
        "confidence_threshold": (not uses.drafter, "there is no drafter"),
        "exchange": (options.tensor_parallel_size == 1, "tensor_parallel_size is 1"),
        "width": (not (uses.drafter or options.exact), "there is no drafter"),
        "memory_fraction": (
            options.num_pages is not None or jax.default_backend() == "cpu",
            "num_pages was given" if options.num_pages is not None else "a CPU has no such limit",
        ),
    }
    for name, (has_no_effect, why) in ignored.items():
        if has_no_effect and getattr(options, name) != getattr(EngineOptions, name):
            log.warning("%s has no effect: %s", name, why)


def context_limit(models: Models, wanted: int) -> int:
    """The smaller of `wanted` and the longest context that all models were made for."""
    limits = limits_of(models)
    name = min(limits, key=lambda name: limits[name])
    if wanted > limits[name]:
        asked = wanted != EngineOptions.max_model_len
        level = logging.WARNING if asked else logging.INFO
        log.log(level, "max_model_len is %d, as the %s was made for no more", limits[name], name)
    return min(wanted, limits[name])


def limits_of(models: Models) -> dict[str, int]:
    """The longest request that each model was made for, by its role."""
    limits = {"target": models.target.max_positions}
    for proposer in models.proposers:
        if proposer.max_positions is not None:
            limits["drafter"] = proposer.max_positions
    return limits
