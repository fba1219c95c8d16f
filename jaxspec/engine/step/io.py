"""What the steps take and what they give."""

import dataclasses

import jax
from jaxtyping import Array, Float, Int

from jaxspec.models.target import Target
from jaxspec.proposers.device import DeviceProposer
from jaxspec.sampling import SlotSampling, TopLogprobs


@dataclasses.dataclass(frozen=True, eq=False)
class Models:
    """What the steps are compiled for: static, without parameters.

    Compared by identity, since every launch compares them. The engine makes equal ones the same
    object, so that engines share compiled programs.
    """

    target: Target
    proposers: tuple[DeviceProposer, ...] = ()
    """Device proposers, the drafter first if there is one. Each of them follows what is committed,
    in every step; at most one proposes in a step."""
    page_size: int = 0
    """Positions per page. The engine sets it."""
    synthetic: bool = False
    """For benchmarks: the number of accepted drafts is drawn, at the rates in params["synthetic"],
    and drafts are not compared. The engine sets it."""


@dataclasses.dataclass(frozen=True)
class Drafting:
    """How the device drafts in a step: a static argument."""

    proposer: int
    """Which of `Models.proposers`."""
    width: int
    """Tokens per request that the step verifies: the newest one and `width - 1` drafts."""
    drawn: bool = False
    """Whether drafts of requests that sample are drawn."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Admission:
    """What the state has to know of a request that is given a slot."""

    slot: Int[Array, ""]
    pages: Int[Array, " max_pages"]
    limit: Int[Array, ""]
    """Length at which its budget is spent."""
    sampling: SlotSampling
    """Scalars."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PromptChunk:
    """One chunk of each of some prompts."""

    slots: Int[Array, " batch"]
    """Slot of every request; the padding slot if there is none."""
    tokens: Int[Array, "batch width"]
    """Prompt tokens, padded at the end."""
    starts: Int[Array, " batch"]
    """Position of the first of them."""
    counts: Int[Array, " batch"]
    """How many are not padding."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verified:
    """What the target answered to a block."""

    tokens: Int[Array, "batch width"]
    """The target's token after every token of the block."""
    num_drafts: Int[Array, " batch"]
    """Drafts that were verified; 0 for requests that took no part."""
    active: Int[Array, " batch"]
    """1 for requests that took part, 0 for those whose budget was spent."""
    features: Float[Array, "batch width features"]
    """The target's hidden states of the block, for the proposers."""
    logprobs: TopLogprobs | None
    """Log probabilities of `tokens`; None in a program that draws nothing."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepResult:
    """What the host reads of a step: request i emitted tokens[i, :emitted[i]]."""

    tokens: Int[Array, "batch width"]
    emitted: Int[Array, " batch"]
    """accepted + 1; 0 for a request that took no part."""
    num_drafts: Int[Array, " batch"]
    """Drafts that were verified."""
    logprobs: TopLogprobs | None
