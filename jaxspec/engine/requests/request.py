"""The host's record of a request, which is immutable."""

import dataclasses

from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.text.stream import StopScan, TextStream

TokenLogprobs = dict[int, float]

NOT_FINITE = -1
"""Stands in a step's result for a token whose logits are not finite."""


@dataclasses.dataclass(frozen=True)
class Tally:
    """The counts of a request's verify steps, with an entry per step."""

    acceptance_lengths: tuple[int, ...] = ()
    drafts: tuple[int, ...] = ()
    """Drafts that were verified."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A request between submission and its last token. A step makes a new record of it."""

    id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    stop_ids: frozenset[int]
    """Ids that end the request: the model's own unless ignored, and those of its parameters."""
    seed: int
    """Seed for everything that is drawn for the request."""
    stream: TextStream
    """Holds the bytes of a character that is not complete yet."""
    scan: StopScan
    """Holds back text that may be the beginning of a stop string."""
    submitted_at: float
    text_prompt: str | None = None
    """The text of the prompt, if it was given as text."""
    draws: bool = False
    """Whether the request needs more than the likeliest token: it samples, or returns log
    probabilities."""
    slot: int | None = None
    """Slot of the request in the engine's state; None while it waits."""
    prefilled: int = 0
    """Tokens of `context` for which prefill steps were launched."""
    resumed: int = 0
    """Number of tokens that were emitted before the state was lost. Prefill reads them again after
    the prompt, except the newest, which is in no cache between two steps."""
    token_ids: tuple[int, ...] = ()
    """Tokens emitted."""
    text: str = ""
    """Text emitted."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Log probabilities per emitted token, if the request asks for them."""
    finish_reason: str | None = None
    """stop, length, abort or error; None while it runs."""
    error: str | None = None
    """Why the request failed."""
    tally: Tally = Tally()
    seated_at: float = 0.0
    """Time at which the request was given a slot."""
    arrivals: tuple[float, ...] = ()
    """Times at which results with tokens for this request were read."""

    @property
    def context(self) -> tuple[int, ...]:
        """The tokens that prefill reads."""
        return self.prompt + self.token_ids[: max(self.resumed - 1, 0)]

    @property
    def known_next(self) -> int | None:
        """The token after `context` if it was emitted before the state was lost."""
        return self.token_ids[self.resumed - 1] if self.resumed else None

    @property
    def length_limit(self) -> int:
        """Committed positions at which the last token of the budget has been emitted."""
        return len(self.prompt) + self.params.max_tokens - 1

    @property
    def is_prefilled(self) -> bool:
        return self.prefilled == len(self.prompt) + max(self.resumed - 1, 0)


@dataclasses.dataclass(frozen=True)
class NewTokens:
    """The tokens that a step emitted for a request."""

    tokens: list[int]
    num_drafts: int
    """Drafts that were verified."""
    logprobs: list[TokenLogprobs]
    """Log probabilities per token; empty unless the request asks for them."""
    read_at: float


@dataclasses.dataclass(frozen=True)
class Increment:
    """The tokens and text that a step added to a request."""

    request: int
    token_ids: tuple[int, ...]
    text: str
    ended: Request | None = None
    """The whole request, if it ended with this increment."""
