"""A server in this process, on a port of its own."""

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx

from jaxspec import Engine, SamplingParams
from jaxspec.engine.setup.load_models import open_models
from jaxspec.serving.listening import bound_socket
from jaxspec.serving.options import ServingOptions
from jaxspec.serving.running import run
from jaxspec.serving.service import Service
from jaxspec.serving.warming import warm

GOLDEN = Path(__file__).parents[1] / "data" / "goldens" / "a"
MODEL = "golden"
QUEUED = 40
SECONDS = 60.0
"""How long anything may take on a busy machine."""


@dataclasses.dataclass
class Server:
    """A running server, with what tests need of it."""

    url: str
    service: Service
    events: asyncio.AbstractEventLoop
    errors: list[BaseException]
    """The error that ended the server, if there was one."""
    thread: threading.Thread

    @property
    def engine(self) -> Engine:
        assert self.service.stats_engine is not None
        return self.service.stats_engine

    def client(self, **settings) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=SECONDS, **settings)

    def post(self, path: str, body: object, **settings) -> httpx.Response:
        with self.client() as client:
            return client.post(path, json=body, **settings)

    def complete(self, prompt: object, **fields) -> dict:
        answer = self.post("/v1/completions", {"prompt": prompt, "temperature": 0} | fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def on_loop(self, work: Callable[[], object]) -> None:
        self.events.call_soon_threadsafe(work)

    def drain(self, seconds: float = 0.0) -> None:
        asyncio.run_coroutine_threadsafe(self.service.drain(seconds), self.events).result(SECONDS)


def golden_engine(**options) -> Engine:
    pair = open_models(GOLDEN / "target", GOLDEN / "draft", dtype="float32")
    sizes = dict(
        max_batch=32,
        max_model_len=192,
        page_size=16,
        prefill_chunk=32,
        batch_sizes=(4, 32),
        prefill_shapes=((4, 32),),
    )
    return Engine.from_models(
        pair.models,
        pair.params,
        pair.tokenizer,
        chat_template=pair.chat_template,
        **sizes | options,
    )


def warm_engine() -> Engine:
    """The golden engine after its first steps, which its statistics do not count."""
    engine = golden_engine()
    warm(engine, "first", print)
    stats = engine.stats()
    assert (stats.finished.num_requests, stats.running, stats.pages_in_use) == (0, 0, 0)
    assert stats.latencies.ttft_s.count == 0
    return engine


@contextlib.contextmanager
def running(
    open_engine: Callable[[], Engine], options: ServingOptions | None = None
) -> Iterator[Server]:
    """Runs a server of this engine, and drains it at the end."""
    listening = bound_socket("127.0.0.1", 0)
    started: list[tuple[Service, asyncio.AbstractEventLoop]] = []
    errors: list[BaseException] = []
    begun = threading.Event()

    def when_started(service: Service) -> None:
        started.append((service, asyncio.get_running_loop()))
        begun.set()

    def serve() -> None:
        try:
            make = lambda: Service((MODEL, "alias"), options or ServingOptions(), open_engine)
            run(make, listening, when_started)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    assert begun.wait(SECONDS)
    [(service, events)] = started
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    server = Server(url, service, events, errors, thread)
    try:
        yield server
    finally:
        if thread.is_alive():
            with contextlib.suppress(RuntimeError):
                server.drain()
        thread.join(SECONDS)
        assert not thread.is_alive()


def until(holds: Callable[[], object], what: str) -> None:
    """Waits until something holds."""
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline, f"{what}, after {SECONDS} s"
        time.sleep(0.01)


def greedy(max_tokens: int, **params) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **params)
