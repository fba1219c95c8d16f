"""What steps take and what they give."""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from jaxspec.models.dflash import DFlash
from jaxspec.models.target import Target
from jaxspec.sampling import SlotSampling, TopLogprobs

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Models:
    """The modules; static, hashable, without parameters."""

    target: Target
    drafter: DFlash | None
    synthetic: bool = False
    """For benchmarks: how many drafts are accepted is drawn, at the rates in
    params["synthetic"]; else the target is asked."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PromptChunk:
    """One chunk of some prompts."""

    slots: Int[Array, " rows"]
    """Slot of every row; the padding slot where there is none."""
    tokens: Int[Array, "rows width"]
    """Prompt tokens, padded at the end."""
    starts: Int[Array, " rows"]
    """Position of the first of them."""
    counts: Int[Array, " rows"]
    """How many are real."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drafts:
    """What is to be verified."""

    tokens: Int[Array, "rows drafts"]
    num_drafts: Int[Array, " rows"]
    """How many of each row's count."""
    logits: Float[Array, "rows drafts vocab"] | None = None
    """What they were drawn from, before each request's temperature and filters; None where they
    were not drawn."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verified:
    """What the target said about a block."""

    tokens: Int[Array, "rows width"]
    """The target's token after every row of the block."""
    num_drafts: Int[Array, " rows"]
    """Drafts that were verified; fewer than proposed near a limit."""
    active: Int[Array, " rows"]
    """1 for slots that took part, 0 for those whose budget was spent."""
    features: Float[Array, "rows width features"]
    """The target's features of every row of the block, for the drafter."""
    logprobs: TopLogprobs | None
    """Of `tokens`; None in a program that draws nothing."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepResult:
    """What the host reads of a step: row i emitted tokens[i, :emitted[i]]."""

    tokens: Int[Array, "rows width"]
    emitted: Int[Array, " rows"]
    """accepted + 1; 0 for a slot that took no part."""
    num_drafts: Int[Array, " rows"]
    """Drafts verified."""
    logprobs: TopLogprobs | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Seat:
    """What the state has to know of a request that takes a slot."""

    slot: Int[Array, ""]
    pages: Int[Array, " max_pages"]
    limit: Int[Array, ""]
    sampling: SlotSampling
    """Scalars."""
