"""A request as the host knows it: an immutable record."""

import dataclasses

from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.engine.stats.acceptance import Tally
from jaxspec.text.stream import StopScan, TextStream

TokenLogprobs = dict[int, float]


@dataclasses.dataclass(frozen=True)
class Request:
    """A request between submission and its last token. A step makes a new record of it."""

    id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    stop_ids: frozenset[int]
    """Ids that end it: the model's own unless ignored, and those of its parameters."""
    seed: int
    """Seed of its draws."""
    stream: TextStream
    """Holds the bytes of a character that is not complete yet."""
    scan: StopScan
    """Holds back text that may be the beginning of a stop string."""
    submitted_at: float
    slot: int | None = None
    """Its place in the engine's state; None while it waits."""
    prefilled: int = 0
    """Tokens of `context` for which prefill steps were launched."""
    resumed: int = 0
    """Emitted tokens that prefill reads again after the prompt, since the pages were lost."""
    token_ids: tuple[int, ...] = ()
    """Tokens emitted."""
    text: str = ""
    """Text emitted."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Per emitted token, if the request asks for them."""
    finish_reason: str | None = None
    """stop, length, abort or error; None while it runs."""
    error: str | None = None
    """Why it failed."""
    tally: Tally = Tally()
    seated_at: float = 0.0
    """Time at which it was given a slot."""
    arrivals: tuple[float, ...] = ()
    """Times at which results with tokens for it were read."""

    @property
    def context(self) -> tuple[int, ...]:
        """The tokens that prefill reads."""
        return self.prompt + self.token_ids[: self.resumed]

    @property
    def length_limit(self) -> int:
        """Committed positions at which the last token of the budget has been emitted."""
        return len(self.prompt) + self.params.max_tokens - 1

    @property
    def committed(self) -> int:
        """Committed positions, as far as the host has read: all tokens but the newest."""
        return len(self.prompt) + max(len(self.token_ids) - 1, 0)

    @property
    def is_prefilled(self) -> bool:
        return self.prefilled == len(self.context)


@dataclasses.dataclass(frozen=True)
class Increment:
    """What a step added to a request."""

    request: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None
