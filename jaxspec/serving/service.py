"""What the routes share: the engine's thread, the phase that the server is in, and its limits."""

import asyncio
import dataclasses
import enum
import gc
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from jaxspec.engine.engine import Engine
from jaxspec.serving.engine_thread import EngineThread, Job
from jaxspec.serving.options import ServingOptions
from jaxspec.serving.refusals import Refusal, bad_request, failed, unavailable
from jaxspec.serving.token_texts import TokenTexts

SWITCH_SECONDS = 0.0005
"""How long the event loop may have to wait for Python's interpreter lock, which the engine's thread
holds while it computes."""
READERS = 2
"""Threads that render and tokenize prompts."""


class Phase(enum.Enum):
    """What the server is doing."""

    STARTING = "the server is starting: models are read and programs compiled"
    READY = "ready"
    DRAINING = "the server is shutting down; ask another one"
    OVER = "the engine has ended"


@dataclasses.dataclass
class Counts:
    """What the server counts itself, because the engine does not see it."""

    ended: Counter[str] = dataclasses.field(default_factory=Counter)
    """Choices that ended, by their reason; those whose client left count as abort."""
    rejections: int = 0
    """Requests that were refused because too many others waited."""


class Service:
    """Everything that lives as long as the server. Used by the event loop only."""

    def __init__(
        self, names: tuple[str, ...], options: ServingOptions, open_engine: Callable[[], Engine]
    ):
        """`names` are what clients may call the model; answers have the first one."""
        self.names = names
        self.options = options
        self.created = int(time.time())
        self.phase = Phase.STARTING
        self.counts = Counts()
        self.unfinished = 0
        """Choices that wait or run."""
        self.error: BaseException | None = None
        """What ended the engine, if it ended by itself."""
        self.ready = asyncio.Event()
        """Set when the server is ready for requests, and also if it never will be."""
        self.over = asyncio.Event()
        """Set when the engine's thread has ended."""
        self.readers = ThreadPoolExecutor(READERS, thread_name_prefix="prompts")
        self._jobs: set[Job] = set()
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._engine: Engine | None = None
        self.thread = EngineThread(open_engine, self._become_ready, self._become_over)

    @property
    def engine(self) -> Engine:
        """The engine; a Refusal if it cannot be asked now."""
        if self._engine is None or self.phase is not Phase.READY:
            raise self._refusal()
        return self._engine

    @property
    def stats_engine(self) -> Engine | None:
        """The engine, for its statistics only, in every phase in which there is one."""
        return self._engine

    def start(self) -> None:
        self.thread.start()

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            known = ", ".join(self.names)
            raise Refusal(404, f"the model {name!r} does not exist; expected {known}", "model")

    def begin(self, job: Job) -> None:
        """Gives a job to the engine, unless too many choices wait already."""
        limit = self.engine.options.max_batch + self.options.max_queued_requests
        count = len(job.prompts)
        if count > limit:
            raise bad_request(
                f"the request has {count} choices, but the server holds {limit} at once; ask for "
                "fewer"
            )
        if self.unfinished + count > limit:
            self.counts.rejections += 1
            raise unavailable(
                f"{self.unfinished} choices run or wait, of at most {limit}; try again later"
            )
        self.unfinished += count
        self._jobs.add(job)
        self._quiet.clear()
        self.thread.submit(job)

    def end(self, job: Job, unfinished: int) -> None:
        """Forgets a job. `unfinished` of its choices have not ended; they are aborted."""
        self._jobs.remove(job)
        self.unfinished -= len(job.prompts)
        if unfinished:
            self.counts.ended["abort"] += unfinished
            self.thread.abort(job)
        if not self._jobs:
            self._quiet.set()

    async def drain(self, seconds: float) -> None:
        """Refuses new requests, waits for running ones, and fails those left after `seconds`."""
        if self.phase is not Phase.OVER:
            self.phase = Phase.DRAINING
        try:
            await asyncio.wait_for(self._quiet.wait(), seconds)
        except TimeoutError:
            self._fail_all(unavailable(Phase.DRAINING.value))
        self.thread.stop()

    def _become_ready(self, engine: Engine) -> None:
        self._engine = engine
        self.texts = TokenTexts(engine.tokenizer)
        gc.collect()
        gc.freeze()  # these objects live as long as the server: never scan them again
        sys.setswitchinterval(SWITCH_SECONDS)
        if self.phase is Phase.STARTING:
            self.phase = Phase.READY
        self.ready.set()

    def _become_over(self, error: BaseException | None) -> None:
        self.error, self.phase = error, Phase.OVER
        self._fail_all(self._refusal())
        self.readers.shutdown(wait=False, cancel_futures=True)
        self.ready.set()
        self.over.set()

    def _fail_all(self, why: Refusal) -> None:
        for job in self._jobs:
            job.mailbox.fail(why)

    def _refusal(self) -> Refusal:
        if self.phase is Phase.OVER and self.error is not None:
            return failed(f"the engine ended: {type(self.error).__name__}")
        return unavailable(self.phase.value)
