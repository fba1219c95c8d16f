"""Engines over the golden DSpark drafters, and changed copies of them."""

import dataclasses
import json
from functools import cache

from golden_pair import GOLDENS, HOUSE, opened

from jaxspec.engine.engine import Engine
from jaxspec.engine.requests.output import RequestOutput
from jaxspec.engine.setup.opened import Opened
from jaxspec.engine.step.io import Models
from jaxspec.models.config import DFlashConfig, MarkovHead
from jaxspec.models.dflash import DFlash
from jaxspec.proposers.dflash import DFlashProposer

WHOLE = 96
"""The reference begins no further step when it has 96 tokens, including the first one."""


@cache
def recorded(which: str, threshold: float = 0.0) -> list[dict]:
    suffix = f"_threshold_{threshold}" if threshold else ""
    return json.loads((GOLDENS / which / f"trajectories{suffix}.json").read_text())["trajectories"]


def config_of(which: str) -> DFlashConfig:
    drafter = opened(which).drafter
    assert drafter is not None
    return drafter.config


def with_config(which: str, params: dict | None = None, **changes) -> Opened:
    """A golden pair whose drafter has another config."""
    pair, config = opened(which), dataclasses.replace(config_of(which), **changes)
    proposer = DFlashProposer(DFlash(config, pair.models.target.dtype))
    return dataclasses.replace(
        pair, models=Models(pair.models.target, (proposer,)), params=params or pair.params
    )


def choosing_among(candidates: int | None) -> Opened:
    """The golden pair, with `candidates` candidates at each drafted position."""
    head = config_of("dspark").transition
    assert isinstance(head, MarkovHead)
    return with_config("dspark", transition=dataclasses.replace(head, candidates=candidates))


def engine_over(pair: Opened, **options) -> Engine:
    options = {"driver": "overlapped", **HOUSE, **options}
    return Engine.from_models(pair.models, pair.params, pair.tokenizer, **options)


def check_recorded(output: RequestOutput, expected: dict, max_tokens: int = WHOLE) -> None:
    """Checks that tokens, accepted drafts and proposed drafts of every step are the reference's."""
    assert (output.finish_reason, output.error) == ("length", None)
    assert list(output.token_ids) == expected["dflash_tokens"][:max_tokens]
    accepted = expected["acceptance_lengths"]
    proposed = expected.get("proposal_lengths", [7] * len(accepted))
    steps, emitted = 0, 1
    while emitted < max_tokens:
        emitted, steps = emitted + accepted[steps], steps + 1
    drafted = [i for i in range(steps) if proposed[i]]
    stats = output.stats
    assert list(stats.acceptance_lengths) == [accepted[i] for i in drafted]
    assert stats.num_spec_steps == len(drafted)
    assert stats.num_draft_tokens == sum(proposed[:steps])
    assert stats.num_accepted_draft_tokens == sum(accepted[i] - 1 for i in drafted)
