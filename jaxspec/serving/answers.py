"""Answers to requests for tokens: whole as JSON, or as a stream of events."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from starlette.types import Receive, Scope, Send

from jaxspec.engine.requests.output import RequestOutput
from jaxspec.serving.engine_thread import Job
from jaxspec.serving.mailbox import Delta
from jaxspec.serving.refusals import Refusal, failed
from jaxspec.serving.service import Service

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
JSON_HEADERS = [(b"content-type", b"application/json")]
EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@runtime_checkable
class Format(Protocol):
    """How the choices of one request are written."""

    def piece(self, choice: int, delta: Delta) -> bytes:
        """The events for what was added to a choice; empty if there is nothing to say yet."""
        ...

    def ending(self, outputs: Sequence[RequestOutput]) -> bytes:
        """The events that end the stream, after those of all choices."""
        ...

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer in one piece."""
        ...


class Answer:
    """An ASGI application that answers one request. If the client leaves, the job is aborted."""

    def __init__(self, service: Service, job: Job, format: Format):
        self._service = service
        self._job = job
        self._format = format
        self._outputs: dict[int, RequestOutput] = {}
        service.begin(job)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._stream if self._job.streams else self._send_whole
        working = asyncio.ensure_future(answer(send))
        left = asyncio.ensure_future(_client_left(receive))
        try:
            await asyncio.wait((working, left), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
        finally:
            self._service.end(self._job, len(self._job.prompts) - len(self._outputs))
            working.cancel()
            left.cancel()
            await asyncio.gather(working, left, return_exceptions=True)

    @property
    def _is_complete(self) -> bool:
        return len(self._outputs) == len(self._job.prompts)

    @property
    def _in_order(self) -> list[RequestOutput]:
        return [self._outputs[choice] for choice in sorted(self._outputs)]

    async def _take(self) -> dict[int, Delta]:
        deltas = await self._job.mailbox.take()
        for choice, delta in deltas.items():
            if delta.output is not None:
                self._outputs[choice] = delta.output
                self._service.counts.ended[delta.output.finish_reason] += 1
        for output in (delta.output for delta in deltas.values()):
            if output is not None and output.error is not None:
                raise failed(output.error)
        return deltas

    async def _send_whole(self, send: Send) -> None:
        while not self._is_complete:
            await self._take()
        body = json.dumps(self._format.whole(self._in_order)).encode()
        length = (b"content-length", str(len(body)).encode())
        await _begin(send, [*JSON_HEADERS, length])
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, send: Send) -> None:
        """Streams the answer. The status is sent only with the first event, so that a request that
        the engine refuses gets the status of an error."""
        begun = False
        try:
            while not self._is_complete:
                events = await self._next_events()
                if not events:
                    continue
                if not begun:
                    begun = True
                    await _begin(send, EVENT_HEADERS)
                await _send_events(send, events, more=not self._is_complete)
        except Refusal as refusal:
            if not begun:
                raise
            await _send_events(send, b"data: " + refusal.body + b"\n\n" + DONE, more=False)

    async def _next_events(self) -> bytes:
        try:
            async with asyncio.timeout(self._service.options.keep_alive_interval):
                deltas = await self._take()
        except TimeoutError:
            return KEEP_ALIVE
        events = b"".join(self._format.piece(choice, delta) for choice, delta in deltas.items())
        return events + self._format.ending(self._in_order) + DONE if self._is_complete else events


async def _begin(send: Send, headers: list[tuple[bytes, bytes]]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _send_events(send: Send, events: bytes, more: bool) -> None:
    await send({"type": "http.response.body", "body": events, "more_body": more})


async def _client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
