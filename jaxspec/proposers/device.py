"""The interface of proposers that run on the device, inside the compiled step.

A device proposer is a frozen, hashable record. It is a static argument of the step, so everything
that changes is in a separate state. The engine keeps this state beside the target's cache, passes
it to each call, and replaces it by the state that the call returns. `examples/own_proposer.py` is a
complete example.
"""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.cache.block import Block, block_after
from jaxspec.models.target import Target
from jaxspec.sampling import SlotSampling

Params = dict[str, Any]
"""Parameters of every model by name: "target", and "drafter" if there is one."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drafts:
    """Draft tokens for every request of a step."""

    tokens: Int[Array, "batch drafts"]
    num_drafts: Int[Array, " batch"]
    """How many of each request's drafts are to be verified, counted from the first."""
    logits: Float[Array, "batch drafts vocab"] | None = None
    """Logits that the tokens were drawn from, before temperature and filters; None if the tokens
    were not drawn. Each of several devices has the same part of the vocabulary as in the target's
    logits."""
    scores: Float[Array, "batch drafts"] | None = None
    """The proposer's own probability of each token, given the drafts before it; None if it has no
    probabilities. Read only if `DraftInputs.scored`."""


@dataclasses.dataclass(frozen=True)
class DraftInputs:
    """What a proposer may read about the requests in a step."""

    slots: Int[Array, " batch"]
    """Slot of each request, which is the index of its entry in a state with one entry per slot."""
    tokens: Int[Array, " batch"]
    """The newest token of each request: it has been emitted and is in no cache yet."""
    lengths: Int[Array, " batch"]
    """Number of committed tokens, which is the position of the newest token."""
    active: Int[Array, " batch"]
    """1 for requests that take part; 0 for padding and for requests at their token limit."""
    num_drafts: Int[Array, " batch"]
    """The most drafts that are wanted for each request; 0 if it opted out."""
    room: Int[Array, " batch"]
    """How many drafts can be accepted before each request reaches its token limit."""
    page_table: Int[Array, "batch max_pages"]
    """Pages of each request, shared by the caches of all models."""
    sampling: SlotSampling
    """How each request's tokens are drawn."""
    page_size: int
    scored: bool = False
    """Whether the step uses `Drafts.scores`: if it cannot verify all drafts, it verifies those most
    likely to be accepted."""

    def block(self, width: int) -> Block:
        """The block of the newest token and the `width - 1` positions after it."""
        counts = self.active * width
        return block_after(self.slots, self.lengths, counts, self.page_table, width, self.page_size)


@dataclasses.dataclass(frozen=True)
class Committed:
    """Tokens that have just been committed: a chunk of a prompt, or a step's accepted tokens."""

    block: Block
    """Where the tokens are. Only the first `block.counts` tokens of each request are committed."""
    tokens: Int[Array, "batch width"]
    features: Float[Array, "batch width features"]
    """The target's hidden states of these tokens after each layer of `target.capture`, side by
    side."""
    target: Target
    """The target, whose embedding a drafter may use."""


@runtime_checkable
class DeviceProposer(Protocol):
    """Proposes drafts inside the compiled step. Drafts change how fast tokens are generated, never
    the distribution that they come from."""

    @property
    def num_drafts(self) -> int:
        """The most drafts that it makes for one request in one step."""
        ...

    @property
    def max_positions(self) -> int | None:
        """Longest context that the proposer supports; None if there is no limit."""
        ...

    def new_state(self, num_slots: int, num_pages: int, page_size: int, positions: int) -> Any:
        """The empty state for all requests: a pytree, with pages or with an entry per slot.

        `num_slots` includes the padding slot. A slot never holds more than `positions` tokens.
        """
        ...

    def propose(
        self,
        target: Target,
        params: Params,
        state: Any,
        inputs: DraftInputs,
        *,
        width: int,
        drawn: bool,
    ) -> tuple[Any, Drafts]:
        """The next state, and `width - 1` drafts for every request.

        If `drawn`, a proposer that has logits draws the drafts of requests that sample from them,
        and returns them as `Drafts.logits`.
        """
        ...

    def absorb(self, params: Params, state: Any, committed: Committed) -> Any:
        """The state after these tokens were committed."""
        ...

    def bytes_read(self, params: Params, target_head: int) -> int:
        """The least number of bytes of parameters that one call of `propose` reads. `target_head`
        is the size of the target's head in bytes, for proposers that use it."""
        ...


@runtime_checkable
class Recalls(Protocol):
    """A proposer that can make its state for a slot from tokens alone. A request can then begin
    after the tokens whose pages earlier requests have filled.

    A proposer that keeps everything in pages does not need this: it has an attribute
    `in_pages = True` instead. With a proposer that has neither, an engine has no prefix cache.

    If what a proposer keeps for a token depends on the token after it, it has an attribute
    `looks_ahead = 1`. A page is then shared only if the token after the page is the same as well.
    """

    def recall(
        self,
        state: Any,
        slot: Int[Array, ""],
        tokens: Int[Array, " positions"],
        count: Int[Array, ""],
    ) -> Any:
        """The state after a new request in this slot has committed the first `count` of these
        tokens. `count` may be 0."""
        ...


@runtime_checkable
class DraftsAnyNumber(Protocol):
    """A proposer whose drafter drafts one token after the other, so it can make any number."""

    def with_num_drafts[Itself](self: Itself, num_drafts: int) -> Itself:
        """The same proposer, with this number of drafts per step."""
        ...


def can_skip_tokens(proposer: Any) -> bool:
    """Whether this proposer need not absorb the tokens that a request found in the prefix cache."""
    return isinstance(proposer, Recalls) or getattr(proposer, "in_pages", False)


def looks_ahead(proposer: Any) -> int:
    """How many of the tokens after a token affect what the proposer keeps for it in pages."""
    return getattr(proposer, "looks_ahead", 0)


def no_drafts(batch: int, width: int = 1) -> Drafts:
    """Empty drafts, with room for `width - 1` per request."""
    return Drafts(jnp.zeros((batch, width - 1), jnp.int32), jnp.zeros(batch, jnp.int32))
