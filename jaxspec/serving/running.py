"""Runs the server on a socket, from its start to its end."""

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn

from jaxspec.serving.app import app_of
from jaxspec.serving.service import Service

SIGNALS = (signal.SIGTERM, signal.SIGINT)
STOP_SECONDS = 10
"""How long the engine's thread may take to end after it was told to stop."""
KEEP_ALIVE_SECONDS = 60
"""How long a connection may wait for its next request."""
LAST_BYTES_SECONDS = 5
"""How long connections may take to send the rest of their answers when all requests have ended."""


class HttpServer(uvicorn.Server):
    """Uvicorn's server, without its own handlers of signals: ours wait for requests first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(
    make_service: Callable[[], Service],
    listening: socket.socket,
    when_started: Callable[[Service], None] | None = None,
) -> bool:
    """Serves until a signal comes or the engine ends. Raises the error that ended the engine.
    Returns whether the engine's thread has ended: if not, it is inside something long, such as
    compiling."""
    config = uvicorn.Config(_nothing, log_config=None)
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        return runner.run(serve(make_service, listening, when_started))


async def serve(
    make_service: Callable[[], Service],
    listening: socket.socket,
    when_started: Callable[[Service], None] | None = None,
) -> bool:
    """The same as `run`, inside an event loop. Signals are handled if this is the main thread; in
    any other thread, the server ends when the service's `drain` is called on this event loop."""
    service = make_service()
    server = _http_server(service)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    draining = _Draining(service)
    with _signals_handled(draining.begin):
        service.start()
        if when_started is not None:
            when_started(service)
        ending = [asyncio.create_task(one) for one in (service.over.wait(), draining.expired())]
        await asyncio.wait([*ending, serving], return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)
        for task in ending:
            task.cancel()
    if service.error is not None:
        raise service.error
    return service.over.is_set()


class _Draining:
    """The shutdown of the server. A signal begins it; a second signal ends all requests at once."""

    def __init__(self, service: Service):
        self._service = service
        self._begun = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        seconds = 0.0 if self._begun.is_set() else self._service.options.shutdown_timeout
        self._begun.set()
        self._tasks.append(asyncio.create_task(self._service.drain(seconds)))

    async def expired(self) -> None:
        """Returns when waiting for the engine's thread to end is no longer worth it: it is late, or
        it is still opening the engine, which cannot be interrupted."""
        await self._begun.wait()
        await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        if self._service.stats_engine is not None:
            await asyncio.sleep(STOP_SECONDS)


@contextlib.contextmanager
def _signals_handled(handle: Callable[[], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    events = asyncio.get_running_loop()
    for one in SIGNALS:
        events.add_signal_handler(one, handle)
    try:
        yield
    finally:
        for one in SIGNALS:
            events.remove_signal_handler(one)


def _http_server(service: Service) -> HttpServer:
    return HttpServer(
        uvicorn.Config(
            app_of(service),
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=LAST_BYTES_SECONDS,
        )
    )


async def _nothing(*_: object) -> None:
    """A stand-in for an application, in a configuration of which only the event loop is used."""
