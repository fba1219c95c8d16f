"""The events that a caller iterates over while requests run."""

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence

from jaxspec.engine.requests.failures import failure_of
from jaxspec.engine.requests.output import RequestOutput
from jaxspec.engine.requests.request import Increment, PromptLogprobs, TokenLogprobs
from jaxspec.engine.schedule.loop import Loop


@dataclasses.dataclass(frozen=True)
class StreamEvent:
    """The tokens and text that one step added to the output of one prompt."""

    index: int
    """Index of the prompt among those of the call; from `Engine.step`, the id of the request."""
    token_ids: tuple[int, ...]
    text: str
    output: RequestOutput | None
    """The whole output in the last event of a prompt; None in earlier events."""
    logprobs: tuple[TokenLogprobs, ...] = dataclasses.field(default=(), repr=False)
    """Per token, log probabilities by token id; empty if the request did not ask for them."""
    prompt_logprobs: PromptLogprobs | None = dataclasses.field(default=None, repr=False)
    """Log probabilities of the prompt, in its first event if the request asked for them."""


class EventStream:
    """An iterator over the events of some requests. It runs steps until the next event exists.

    Closing or deleting the iterator, or an exception in a step, ends the requests that still run.
    """

    def __init__(
        self,
        loop: Loop,
        event: Callable[[int, Increment], StreamEvent],
        requests: Sequence[int],
        raises: bool,
    ):
        """With `raises`, a RequestFailed is raised after the last event if requests failed."""
        self._raises = raises
        self._failed: dict[int, RequestOutput] = {}
        self._loop = loop
        self._event = event
        self._indices = {id: index for index, id in enumerate(requests)}
        self._running = set(requests)
        self._increments: deque[Increment] = deque()
        loop.abandoned.when_collected(self, requests)

    def __iter__(self) -> "EventStream":
        return self

    def __next__(self) -> StreamEvent:
        try:
            return self._next_event()
        except BaseException:  # including the end of the stream
            self.close()
            raise

    def _next_event(self) -> StreamEvent:
        while not self._increments:
            if not (self._running and self._loop.take_or_step(self._running, self._increments)):
                raise self._end()
        increment = self._increments.popleft()
        if increment.ended is not None:
            self._running.discard(increment.request)
        event = self._event(self._indices[increment.request], increment)
        if self._raises and event.output is not None and event.output.error is not None:
            self._failed[event.index] = event.output
        return event

    def _end(self) -> Exception:
        return failure_of(self._failed, len(self._indices)) or StopIteration()

    def close(self) -> None:
        """Ends the requests that still run; there are no more events."""
        self._running, self._failed = set(), {}
        self._increments.clear()
        self._loop.abandon(self._indices)
