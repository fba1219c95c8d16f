"""The host's record of a request, which is immutable."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.text.stream import StopScan, TextStream

TokenLogprobs = dict[int, float]
PromptLogprobs = tuple[TokenLogprobs | None, ...]
"""One entry per token of a prompt. The first is None: nothing comes before the first token."""

NOT_FINITE = -1
"""Stands in a step's result for a token whose logits are not finite."""


class Gained(NamedTuple):
    """What one step added to a request."""

    token_ids: tuple[int, ...] = ()
    """Tokens up to the one that ended the request."""
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Log probabilities per token; empty unless the request asks for them."""
    emitted: int = 0
    """Tokens that the step emitted, including those after the end of the request."""
    num_drafts: int = 0
    """Drafts that were verified. A step without drafts is plain decoding."""
    read_at: float | None = None
    """When the result of the step was read; None for text that was held back until the end."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class History:
    """The steps of a request, oldest first. It never changes.

    A longer history shares its steps with the shorter one that it was made from, so that adding a
    step copies nothing, however many there are. The steps are copied only if a second step is added
    to the same history, which happens after a fault in the middle of a step.
    """

    _shared: list[Gained] = dataclasses.field(default_factory=list)
    """The steps of this history, and perhaps further ones that belong to longer histories."""
    _length: int = 0

    def with_step(self, step: Gained) -> "History":
        """A history with one step more."""
        ours = len(self._shared) == self._length
        shared = self._shared if ours else self._shared[: self._length]
        shared.append(step)
        return History(shared, self._length + 1)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Gained]:
        return itertools.islice(self._shared, self._length)


@dataclasses.dataclass(frozen=True)
class Request:
    """A request from its submission to its last token. Each step makes a new record of it."""

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
    """The text of the prompt, if it was given as text or as a chat."""
    cache_salt: str | None = None
    """Only requests with the same salt share pages."""
    end_ids: frozenset[int] = frozenset()
    """Those of `stop_ids` that are the model's own."""
    draws: bool = False
    """Whether the request needs more than the likeliest token: it samples, or returns log
    probabilities."""
    passed_pages: int = 0
    """Number of pages that later requests were given while there were too few for this one."""
    slot: int | None = None
    """Slot of the request in the engine's state; None while it waits."""
    prefilled: int = 0
    """Tokens of `context` that were found in the cache or are read by steps launched so far."""
    begins_at: int = 0
    """Tokens of `context` that were found in the cache, so that reading begins after them."""
    cached_tokens: int = 0
    """Tokens of the prompt that were found in the cache."""
    saves_at: tuple[int, ...] = ()
    """Lengths of `context` at which a chunk must end, so that the state there can be saved."""
    resumed: int = 0
    """Number of tokens that were emitted before the device's state was lost; 0 if it never was.
    Prefill reads them again after the prompt, except the newest, which is in no cache yet."""
    history: History = dataclasses.field(default_factory=History)
    """What each of its steps added."""
    num_tokens: int = 0
    """Number of tokens emitted."""
    scored: tuple[TokenLogprobs, ...] = ()
    """Log probabilities of the prompt's tokens from the second on, as far as the prompt was read;
    empty unless the request asks for them."""
    finish_reason: str | None = None
    """stop, length, abort or error; None while it runs."""
    stop_reason: str | int | None = None
    """The stop string or the stop token id of its parameters that ended it. None if it ended in
    another way, for example with the model's own end token."""
    error: str | None = None
    """Why the request failed."""
    seated_at: float = 0.0
    """Time at which the request was given a slot."""

    def changed(self, **fields: Any) -> "Request":
        """`dataclasses.replace` without `__init__`, which takes most of a step's host time."""
        other = object.__new__(Request)
        vars(other).update(vars(self), **fields)
        return other

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The emitted tokens, put together anew at every call."""
        return tuple(token for step in self.history for token in step.token_ids)

    @property
    def text(self) -> str:
        """The emitted text."""
        return "".join(step.text for step in self.history)

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Log probabilities per emitted token, if the request asks for them."""
        return tuple(token for step in self.history for token in step.logprobs)

    @property
    def context(self) -> tuple[int, ...]:
        """The tokens that prefill reads."""
        return self.prompt + self.token_ids[: self.resumed - 1] if self.resumed else self.prompt

    @property
    def next_halt(self) -> int:
        """The length of `context` at which the next chunk ends at the latest."""
        return next((at for at in self.saves_at if at > self.prefilled), len(self.context))

    @property
    def known_next(self) -> int | None:
        """The token after `context` if it was emitted before the state was lost."""
        return self.token_ids[self.resumed - 1] if self.resumed else None

    @property
    def length_limit(self) -> int:
        """Number of committed positions once the last token of the budget has been emitted."""
        return len(self.prompt) + self.params.max_tokens - 1

    @property
    def committed(self) -> int:
        """Number of positions whose keys and values are final. The newest token is not among them,
        since it is in no cache yet, and steps whose results were not read write only after it."""
        if not (self.num_tokens and self.is_prefilled):
            return self.prefilled
        return len(self.prompt) + self.num_tokens - 1

    @property
    def reads_whole_prompt(self) -> bool:
        """Whether the target must read every token of the prompt, because log probabilities of the
        prompt are wanted."""
        return self.params.prompt_logprobs is not None

    @property
    def scores_next_chunk(self) -> bool:
        """Whether the next chunk has tokens of the prompt whose log probabilities are wanted."""
        done = max(self.prefilled, len(self.scored))
        return self.reads_whole_prompt and done < len(self.prompt) - 1

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """Log probabilities per token of the prompt; None until all were read, or if the request
        does not ask for them."""
        whole = self.reads_whole_prompt and len(self.scored) == len(self.prompt) - 1
        return (None, *self.scored) if whole else None

    @property
    def is_prefilled(self) -> bool:
        return self.prefilled == len(self.prompt) + max(self.resumed - 1, 0)


class NewTokens(NamedTuple):
    """The tokens that a step emitted for a request."""

    tokens: list[int]
    num_drafts: int
    """Drafts that were verified."""
    logprobs: list[TokenLogprobs]
    """Log probabilities per token; empty unless the request asks for them."""
    read_at: float


class Increment(NamedTuple):
    """What a step added to a request."""

    request: int
    gained: Gained
    ended: Request | None = None
    """The whole request, if it ended with this increment."""
    prompt_logprobs: PromptLogprobs | None = None
    """Log probabilities of the prompt, in the first increment of a request that asks for them."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.gained.token_ids
