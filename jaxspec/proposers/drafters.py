"""Chooses the proposer that runs a drafter model, by the drafter's config."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.typing import DTypeLike

from jaxspec.models.config import DrafterConfig
from jaxspec.models.dflash import DFlash
from jaxspec.models.eagle3 import Eagle3
from jaxspec.models.eagle3_config import Eagle3Config
from jaxspec.proposers.device import DeviceProposer
from jaxspec.proposers.dflash import DFlashProposer
from jaxspec.proposers.eagle3 import Eagle3Proposer

Drafter = DFlash | Eagle3
"""A drafter model."""


def proposer_of(config: DrafterConfig, dtype: DTypeLike) -> DFlashProposer | Eagle3Proposer:
    """The proposer for a drafter with this config."""
    if isinstance(config, Eagle3Config):
        return Eagle3Proposer(Eagle3(config, dtype))
    return DFlashProposer(DFlash(config, dtype))


def drafter_in(proposers: Sequence[DeviceProposer]) -> Drafter | None:
    """The drafter model of the first proposer that has one; None if none has."""
    with_models = (DFlashProposer, Eagle3Proposer)
    return next((one.drafter for one in proposers if isinstance(one, with_models)), None)


def with_threshold(proposer: DeviceProposer, threshold: float) -> DeviceProposer | None:
    """The proposer with this confidence threshold; None if it has no confidence head."""
    if not isinstance(proposer, DFlashProposer) or proposer.drafter.config.confidence is None:
        return None
    return dataclasses.replace(proposer, confidence_threshold=threshold)


def with_quantised_inputs(proposer: DeviceProposer) -> DeviceProposer:
    """The proposer with a drafter that rounds activations to 8 bits, if it has matrices in 8 bits;
    otherwise the proposer itself."""
    if not isinstance(proposer, DFlashProposer) or proposer.drafter.config.decoder.fp8 is None:
        return proposer
    return dataclasses.replace(proposer, drafter=proposer.drafter.with_quantised_inputs())


def kind_of(proposer: Any) -> str | None:
    """Which of `DRAFTERS` a proposer runs; None if it runs none of them."""
    return getattr(proposer, "kind", None)
