"""Gives a drafter in FP8 its copy of the head, when models are opened."""

import dataclasses
import logging
from typing import Any

import jax

from jaxspec.checkpoint.fp8_config import OF_DRAFTER
from jaxspec.errors import LoadError, is_out_of_memory
from jaxspec.models.config import DFlashConfig, DrafterConfig
from jaxspec.models.copied_head import copy_of_head, why_not_copied
from jaxspec.models.dflash import DFlash
from jaxspec.models.parameters import num_bytes
from jaxspec.proposers.device import Params

log = logging.getLogger("jaxspec")


def copying_head(config: DrafterConfig, devices: int) -> DrafterConfig:
    """The config of a drafter on so many devices. If the drafter is in FP8, it copies the head that
    it uses, unless this is not possible, which the log says."""
    if not isinstance(config, DFlashConfig) or config.decoder.fp8 is None:
        return config
    reason = why_not_copied(config, devices)
    if reason is not None:
        log.info("%s leaves the head as it is: %s", OF_DRAFTER, reason)
    return dataclasses.replace(config, copies_head=reason is None)


def say_if_unread(drafter: Any) -> None:
    """Says in the log if the steps of an engine do not read the copy that its drafter has."""
    if not isinstance(drafter, DFlash) or not drafter.config.copies_head:
        return
    if drafter.copied_head_product(places=1) is None:
        log.info("%s: no kernel multiplies the copy of the head; it is not read", OF_DRAFTER)


def with_copied_head(config: DrafterConfig, params: Params) -> Params:
    """The parameters of a target and its drafter, with the copy if the drafter has one. Like other
    parameters, the copy does not change when the head is replaced."""
    if not isinstance(config, DFlashConfig) or not config.copies_head:
        return params
    try:
        copy = jax.block_until_ready(copy_of_head(config, params))
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise LoadError(
            f"the drafter's copy of a head of {config.vocab_size} tokens does not fit the device's "
            f"free memory; leave {OF_DRAFTER} out, or load smaller models"
        ) from error
    log.info("copied the head in FP8 for the drafter: %.3g GB", num_bytes(copy) / 1e9)
    return params | {"drafter": params["drafter"] | copy}
