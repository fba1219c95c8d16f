"""The thread that owns the engine: it takes orders between steps, and sends news after each."""

import asyncio
import dataclasses
import queue
import threading
from collections.abc import Callable, Sequence

from jaxspec.engine.engine import Engine
from jaxspec.engine.event_stream import StreamEvent
from jaxspec.engine.requests.prompts import Prompt
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.errors import UsageError
from jaxspec.serving.mailbox import Mailbox
from jaxspec.serving.refusals import bad_request

NAME = "engine"


@dataclasses.dataclass(eq=False)
class Job:
    """The choices of one request. Only the engine's thread reads or writes `ids`."""

    prompts: Sequence[Prompt]
    """A prompt for each choice."""
    params: Sequence[SamplingParams]
    mailbox: Mailbox
    streams: bool
    """Whether the answer needs every event; otherwise it gets only the last one of each choice."""
    ids: tuple[int, ...] = ()
    """The numbers that the engine gave the choices."""


@dataclasses.dataclass(frozen=True)
class News:
    """What happened to one choice, or to a whole job."""

    job: Job
    choice: int
    what: StreamEvent | Exception


Order = Callable[[], None]


class EngineThread(threading.Thread):
    """Runs steps while there are requests, and otherwise sleeps until there is an order.

    All news of a step goes to the event loop in one call, because each call wakes it.
    """

    def __init__(
        self,
        open_engine: Callable[[], Engine],
        when_ready: Callable[[Engine], None],
        when_over: Callable[[BaseException | None], None],
    ):
        """`when_ready` and `when_over` are called on the event loop that is running now."""
        super().__init__(name=NAME, daemon=True)
        self._open_engine = open_engine
        self._when_ready = when_ready
        self._when_over = when_over
        self._events = asyncio.get_running_loop()
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._choices: dict[int, tuple[Job, int]] = {}
        """The job and the choice of every request that runs, by the engine's number."""
        self._news: list[News] = []
        self._stopped = False
        self.steps = 0
        """Steps that were run, for tests and measurements."""

    # From the event loop

    def submit(self, job: Job) -> None:
        self._orders.put(lambda: self._submit(job))

    def abort(self, job: Job) -> None:
        """Ends the choices of a job that still run, without sending news of them."""
        self._orders.put(lambda: self._abort(job))

    def call(self, work: Callable[[Engine], None]) -> None:
        """Runs `work` on the engine's thread, between two steps."""
        self._orders.put(lambda: work(self._engine))

    def stop(self) -> None:
        """Ends the thread after the step that runs now; requests that still run are dropped."""
        self._orders.put(self._stop)

    # On the thread

    def run(self) -> None:
        error: BaseException | None = None
        try:
            with self._open_engine() as self._engine:
                self._tell(lambda: self._when_ready(self._engine))
                while not self._stopped:
                    self._turn()
        except BaseException as found:
            error = found
        self._tell(lambda: self._when_over(error))

    def _turn(self) -> None:
        """Carries out all orders, waiting for one if there is nothing to do, and runs a step."""
        idle = not self._choices
        while idle or not self._orders.empty():
            self._orders.get()()
            idle = False
        if self._choices and not self._stopped:
            self._note(self._engine.step(self._choices))
            self.steps += 1
        if self._news:
            news, self._news = self._news, []
            self._tell(lambda: deliver(news))

    def _note(self, events: Sequence[StreamEvent]) -> None:
        for event in events:
            job, choice = self._choices[event.index]
            if event.output is not None:
                del self._choices[event.index]
            if job.streams or event.output is not None:
                self._news.append(News(job, choice, event))

    def _submit(self, job: Job) -> None:
        try:
            job.ids = tuple(self._engine.submit_all(job.prompts, job.params))
        except UsageError as error:
            self._news.append(News(job, 0, bad_request(str(error))))
            return
        self._choices |= {id: (job, choice) for choice, id in enumerate(job.ids)}

    def _abort(self, job: Job) -> None:
        left = [id for id in job.ids if self._choices.pop(id, None) is not None]
        if left:
            self._engine.abort(left)

    def _stop(self) -> None:
        self._stopped = True

    def _tell(self, call: Callable[[], None]) -> None:
        try:
            self._events.call_soon_threadsafe(call)
        except RuntimeError:  # the event loop is closed
            self._stopped = True


def deliver(news: Sequence[News]) -> None:
    """Puts every piece of news into the mailbox of its job."""
    for one in news:
        if isinstance(one.what, Exception):
            one.job.mailbox.fail(one.what)
        else:
            one.job.mailbox.add(one.choice, one.what)
