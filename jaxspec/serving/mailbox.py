"""Holds the events of a request between the engine's thread and the answer, which takes them."""

import asyncio
import dataclasses
from collections.abc import Sequence

from jaxspec.engine.event_stream import StreamEvent
from jaxspec.engine.requests.output import RequestOutput
from jaxspec.engine.requests.request import TokenLogprobs


@dataclasses.dataclass(frozen=True)
class Delta:
    """What was added to one choice since the last look."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...]
    output: RequestOutput | None
    """The whole output if the choice has ended."""


class Mailbox:
    """The events of one request that its answer has not taken yet. Used by the event loop only.

    If the answer is slower than the engine, for example because the client reads slowly, the events
    of several steps become one delta per choice.
    """

    def __init__(self) -> None:
        self._events: dict[int, list[StreamEvent]] = {}
        self._error: Exception | None = None
        self._filled = asyncio.Event()

    def add(self, choice: int, event: StreamEvent) -> None:
        self._events.setdefault(choice, []).append(event)
        self._filled.set()

    def fail(self, error: Exception) -> None:
        """Stores the error for which the request cannot go on; the next `take` raises it."""
        self._error = error
        self._filled.set()

    async def take(self) -> dict[int, Delta]:
        """Waits until there are events or an error, and returns what is new, by choice."""
        await self._filled.wait()
        self._filled.clear()
        if self._error is not None:
            raise self._error
        events, self._events = self._events, {}
        return {choice: _joined(several) for choice, several in events.items()}


def _joined(events: Sequence[StreamEvent]) -> Delta:
    last = events[-1]
    if len(events) == 1:
        return Delta(last.token_ids, last.text, last.logprobs, last.output)
    return Delta(
        tuple(id for event in events for id in event.token_ids),
        "".join(event.text for event in events),
        tuple(one for event in events for one in event.logprobs),
        last.output,
    )
