"""The events that a caller iterates over while requests run."""

import dataclasses
import sys
from collections import deque
from collections.abc import Callable, Sequence

from jaxspec.engine.requests.output import RequestOutput
from jaxspec.engine.requests.request import Increment
from jaxspec.engine.schedule.loop import Loop


@dataclasses.dataclass(frozen=True)
class StreamEvent:
    """The tokens and text that one step added to the output of one prompt."""

    index: int
    """Index of the prompt."""
    token_ids: tuple[int, ...]
    text: str
    output: RequestOutput | None
    """The whole output in the last event of a prompt; None in earlier events."""


class EventStream:
    """An iterator over the events of some requests. It runs steps until the next event exists.

    Closing or deleting the iterator, or an exception in a step, ends the requests that still run.
    """

    def __init__(
        self, loop: Loop, event: Callable[[int, Increment], StreamEvent], requests: Sequence[int]
    ):
        self._loop = loop
        self._event = event
        self._indices = {id: index for index, id in enumerate(requests)}
        self._running = set(requests)
        self._increments: deque[Increment] = deque()

    def __iter__(self) -> "EventStream":
        return self

    def __next__(self) -> StreamEvent:
        try:
            self._wait_for_increments()
        except BaseException:
            self.close()
            raise
        if not self._increments:
            self.close()
            raise StopIteration
        increment = self._increments.popleft()
        if increment.finish_reason is not None:
            self._running.discard(increment.request)
        return self._event(self._indices[increment.request], increment)

    def _wait_for_increments(self) -> None:
        while self._running and not self._increments:
            self._increments.extend(self._loop.take_increments(self._running))
            if not self._increments:
                self._loop.step()

    def close(self) -> None:
        """Ends the requests that still run; there are no more events."""
        running, self._running = self._running, set()
        indices, self._indices = self._indices, {}
        self._increments.clear()
        self._loop.abort(running)
        for id in indices:
            self._loop.forget(id)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.close()
