"""The inputs and results of the steps."""

import dataclasses

import jax
from jaxtyping import Array, Float, Int

from jaxspec.cache.cache import Written
from jaxspec.layers.shards import WHOLE, Shards
from jaxspec.models.target import Target
from jaxspec.proposers.device import DeviceProposer
from jaxspec.sampling import SlotSampling, TopLogprobs


@dataclasses.dataclass(frozen=True, eq=False)
class Models:
    """The models that the steps are compiled for: a static argument, without parameters.

    Records are compared by identity, which is fast, because every launch compares them. Engines
    with equal models use the same object, so that they share compiled programs.
    """

    target: Target
    proposers: tuple[DeviceProposer, ...] = ()
    """Device proposers, the drafter first if there is one. All of them absorb the committed tokens
    of every step; at most one proposes in a step."""
    page_size: int = 0
    """Positions per page. The engine sets it."""
    synthetic: bool = False
    """For benchmarks: whether the number of accepted drafts is drawn at the rates in
    params["synthetic"], instead of comparing drafts. The engine sets it."""

    @property
    def shards(self) -> Shards:
        """Over how many devices the models are split, and how partial sums are added up."""
        return getattr(self.target, "shards", WHOLE)


@dataclasses.dataclass(frozen=True)
class Drafting:
    """How the device drafts in a step: a static argument."""

    proposer: int
    """Index in `Models.proposers`."""
    width: int
    """Tokens per request for which there is room: the newest one and `width - 1` drafts."""
    drawn: bool = False
    """Whether drafts of requests that sample are drawn."""
    num_tokens: int | None = None
    """Tokens that the step verifies for all requests together, shared out to the drafts that are
    most likely accepted; None if every request has `width` of its own."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Admission:
    """The entries of the state for requests that are given slots."""

    slots: Int[Array, " batch"]
    """The slot of every request. If there are fewer requests than entries, one is repeated."""
    pages: Int[Array, "batch max_pages"]
    lengths: Int[Array, " batch"]
    """Number of tokens of each text that its first pages hold already."""
    limits: Int[Array, " batch"]
    """Committed length at which each request's budget is spent."""
    sampling: SlotSampling
    tokens: Int[Array, "batch positions"] | None = None
    """The tokens that the first pages hold, padded; None if no proposer needs them."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PromptChunk:
    """The next chunk of each of several prompts."""

    slots: Int[Array, " batch"]
    """Slot of every request; the padding slot for entries that only pad the batch."""
    tokens: Int[Array, "batch width"]
    """Prompt tokens, padded at the end."""
    starts: Int[Array, " batch"]
    """Position of the first token of each chunk."""
    counts: Int[Array, " batch"]
    """Number of tokens of each chunk that are not padding."""
    known: Int[Array, " batch"] | None = None
    """The token after the prompt if it was chosen before, else -1. None if all are to be chosen."""
    following: Int[Array, "batch width"] | None = None
    """The prompt's token after each token, whose log probability is returned; 0 after its last
    token. None if no request asks for log probabilities of its prompt."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verified:
    """The target's results for a block."""

    tokens: Int[Array, "batch width"]
    """The target's token after every token of the block. If its logits are not finite, this is
    `NOT_FINITE`, to which no draft is equal."""
    num_drafts: Int[Array, " batch"]
    """Drafts that were verified; 0 for requests that took no part."""
    active: Int[Array, " batch"]
    """1 for requests that took part, 0 for those whose budget was spent."""
    features: Float[Array, "batch width features"]
    """The target's hidden states of the block, for the proposers."""
    written: Written
    """What the layers of a recurrent target keep of the block until it is committed."""
    logprobs: TopLogprobs | None
    """Log probabilities of `tokens`; None in a program that draws nothing."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepResult:
    """The results of a step that the host reads: request i emitted tokens[i, :emitted[i]]."""

    tokens: Int[Array, "batch width"]
    """`NOT_FINITE` in place of a token whose logits are not finite."""
    emitted: Int[Array, " batch"]
    """accepted + 1; 0 for a request that took no part."""
    num_drafts: Int[Array, " batch"]
    """Drafts that were verified."""
    logprobs: TopLogprobs | None
    prompt: TopLogprobs | None = None
    """Log probabilities of `PromptChunk.following`; None in every other program."""
