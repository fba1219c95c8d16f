"""One request on its way: what is known of it on the host, as a value."""

import dataclasses

from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.engine.stats.acceptance import Tally
from jaxspec.text.stream import StopScan, TextStream

TokenLogprobs = dict[int, float]


@dataclasses.dataclass(frozen=True)
class Request:
    """A request from submission to its last token. A step gives its successor."""

    id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    stop_ids: frozenset[int]
    """Ids that end it: the model's own unless ignored, and those it asked for."""
    seed: int
    """Of its draws."""
    stream: TextStream
    """Bytes of a character that is not complete yet."""
    scan: StopScan
    """Text held back because a stop string may start with it."""
    submitted_at: float
    slot: int | None = None
    """Its place in the engine's state; None while it waits."""
    prefilled: int = 0
    """Tokens of `context` that prefill steps were launched for."""
    resumed: int = 0
    """Emitted tokens that count as prompt, after its pages were lost and it began anew."""
    token_ids: tuple[int, ...] = ()
    """Tokens emitted."""
    text: str = ""
    """Text emitted."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Per emitted token, where asked for."""
    finish_reason: str | None = None
    """stop, length, abort or error; None while it runs."""
    error: str | None = None
    """Why it failed."""
    tally: Tally = Tally()
    seated_at: float = 0.0
    """When it was given a slot."""
    arrivals: tuple[float, ...] = ()
    """When results with tokens for it were read."""

    @property
    def context(self) -> tuple[int, ...]:
        """What prefill reads."""
        return self.prompt + self.token_ids[: self.resumed]

    @property
    def length_limit(self) -> int:
        """Committed rows at which the last token of the budget has been emitted."""
        return len(self.prompt) + self.params.max_tokens - 1

    @property
    def rows(self) -> int:
        """Committed rows, as far as the host has read: all tokens but the newest."""
        return len(self.prompt) + max(len(self.token_ids) - 1, 0)

    @property
    def is_prefilled(self) -> bool:
        return self.prefilled == len(self.context)


@dataclasses.dataclass(frozen=True)
class Increment:
    """What a step added to one request."""

    request: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None
