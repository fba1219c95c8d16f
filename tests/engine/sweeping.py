"""Raises an exception at every line of the engine that runs, one per run, and checks the outcome:
each request gets exactly its tokens, nothing is leaked, and the engine goes on.

`tests/engine/test_sweep.py` runs a part of this, `scripts/sweep_faults.py` all of it.
"""

import collections
import dataclasses
import gc
import random
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType

from book_checks import check_book, check_contents, check_states
from fake_device import FakeState, Guesser

import jaxspec.engine
from jaxspec.engine.engine import Engine
from jaxspec.engine.requests.failures import Errors, RequestFailed
from jaxspec.engine.requests.output import RequestOutput
from jaxspec.engine.requests.request import PromptLogprobs
from jaxspec.engine.requests.sampling_params import SamplingParams
from jaxspec.engine.schedule.beside import shapes_of_inputs
from jaxspec.engine.step.observer import StepObserver

ROOM = Path(jaxspec.engine.__file__).parent
LEFT_OUT = {ROOM / "schedule" / "turn.py"}
"""Files without injections. This one takes and gives back the lock, and explains itself why no
signal can arrive between its lines."""
MOST_STEPS, MOST_HITS = 400, 20_000
"""Limits that show that an engine does not end. A scenario takes about 40 steps, and a line runs
some hundred times in it."""

Line = tuple[CodeType, int]


class Spins(BaseException):
    """Raised if the engine does not come to an end."""


class Wrong(Exception):
    """Raised if the outcome of a run is not the expected one."""


# What is asked of the engine


@dataclasses.dataclass(frozen=True)
class Ask:
    """A prompt, and how it is continued."""

    prompt: tuple[int, ...]
    params: SamplingParams


@dataclasses.dataclass(frozen=True)
class Asks:
    """The requests of a scenario."""

    bystander: Ask
    submitted: Ask
    aborted: Ask
    left: tuple[Ask, ...]
    generated: tuple[Ask, ...]
    after: Ask


@dataclasses.dataclass
class Reply:
    """What a caller got for one request."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    output: RequestOutput | None = None
    raised: str | None = None
    """The exception that the caller got instead of the rest."""


class StepLimit(StepObserver):
    def __init__(self) -> None:
        self.steps = 0

    def step_begins(self, running: int) -> None:
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise Spins(f"{self.steps} steps")


class Reader:
    """Streams some requests."""

    def __init__(self, engine: Engine, asks: tuple[Ask, ...], errors: Errors = "raise"):
        self.replies = [Reply() for _ in asks]
        self.events = None
        with self._noting():
            params = [ask.params for ask in asks]
            prompts = [list(ask.prompt) for ask in asks]
            self.events = engine.stream(prompts, params, errors=errors)

    def take(self, count: int) -> None:
        """Takes events. No signal may come between the return of an event and the `extend`, because
        the event would be lost here, after the engine has handed it over."""
        for _ in range(count):
            with self._noting():
                for event in self.events or ():
                    reply = self.replies[event.index]
                    reply.output = event.output
                    reply.tokens.extend(event.token_ids)
                    break
                else:
                    return

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except RequestFailed as error:
            failed = [i for i, one in enumerate(self.replies) if one.output and one.output.error]
            if list(error.outputs) != failed or any(one.output is None for one in self.replies):
                raise Wrong(
                    f"{error} was raised although the replies are {self.replies}"
                ) from error
        except (KeyboardInterrupt, MemoryError) as error:
            for reply in self.replies:
                reply.raised = reply.raised or type(error).__name__


class Submitter:
    """Submits one request and runs steps. After an exception it goes on, because nothing may be
    lost. After many exceptions it gives up."""

    def __init__(self, engine: Engine, ask: Ask):
        self.engine, self.reply, self.id, self.patience = engine, Reply(), None, 5
        self.unheard = False
        """Whether `abort` raised, so that it has to be called again."""
        try:
            self.id = engine.submit(list(ask.prompt), ask.params)
        except (KeyboardInterrupt, MemoryError) as error:
            self.reply.raised = type(error).__name__

    def step(self, times: int) -> None:
        for _ in range(times):
            if self.id is None or self.reply.output is not None or not self.patience:
                return
            try:
                events = self.engine.step([self.id])
            except (KeyboardInterrupt, MemoryError) as error:
                self.patience -= 1
                if not self.patience:
                    self.reply.raised = type(error).__name__
                continue
            for event in events:
                self.reply.tokens.extend(event.token_ids)
                self.reply.output = event.output

    def abort(self) -> None:
        if self.id is not None:
            try:
                self.engine.abort([self.id])
            except (KeyboardInterrupt, MemoryError):
                self.unheard = True


def run(engine: Engine, asks: Asks, unheard: list[Submitter]) -> dict[str, Reply]:
    """Runs streams, submitted requests and `generate` beside each other. Requests whose `abort`
    raised are added to `unheard`."""
    shapes_of_inputs.cache_clear()  # so that its lines run as often in every run
    bystander = Reader(engine, (asks.bystander,))
    bystander.take(2)
    submitted, aborted = Submitter(engine, asks.submitted), Submitter(engine, asks.aborted)
    submitted.step(2)
    left = Reader(engine, asks.left, errors="return")
    left.take(2)
    aborted.abort()
    del left
    replies = _generate(engine, asks.generated)
    submitted.step(MOST_STEPS)
    bystander.take(MOST_STEPS)
    for _ in range(2):
        try:
            engine.stats()
        except (KeyboardInterrupt, MemoryError):
            pass
    if submitted.reply.output is None:
        submitted.abort()
    for one in (submitted, aborted):
        if one.unheard:
            unheard.append(one)
    return {"bystander": bystander.replies[0], "submitted": submitted.reply, **replies}


def _generate(engine: Engine, asks: tuple[Ask, ...]) -> dict[str, Reply]:
    replies = {f"generated {i}": Reply() for i in range(len(asks))}
    try:
        params = [ask.params for ask in asks]
        outputs = engine.generate([list(ask.prompt) for ask in asks], params, errors="return")
        for reply, output in zip(replies.values(), outputs, strict=True):
            reply.tokens, reply.output = list(output.token_ids), output
    except (KeyboardInterrupt, MemoryError) as error:
        for reply in replies.values():
            reply.raised = type(error).__name__
    return replies


def after(engine: Engine, asks: Asks) -> Reply:
    """The next request of an engine that has seen a fault."""
    output = engine.generate(list(asks.after.prompt), asks.after.params)
    return Reply(list(output.token_ids), output)


# What must be so


Ending = tuple[list[int], str, str | None, PromptLogprobs | None]
Truth = dict[str, Ending]
"""Tokens, finish reason, error and prompt log probabilities of all requests, if nothing fails."""


def truth(engine: Engine, asks: Asks) -> Truth:
    replies = run(engine, asks, []) | {"after": after(engine, asks)}
    check_nothing_is_leaked(engine)
    return {name: _ending(reply) for name, reply in replies.items()}


def _ending(reply: Reply) -> Ending:
    if reply.output is None:
        raise Wrong(f"a request has no output: {reply}")
    output = reply.output
    return reply.tokens, output.finish_reason, output.error, output.prompt_logprobs


def check_reply(name: str, reply: Reply, true: Truth, may_end: tuple[str, ...] = ()) -> str:
    """Checks a reply, and says how the request ended. Exceptions of `may_end` may be its error."""
    tokens, _, error, _ = true[name]
    if reply.output is not None and list(reply.output.token_ids) != reply.tokens:
        raise Wrong(f"{name}: events {reply.tokens}, output {reply.output.token_ids}")
    if reply.tokens != tokens[: len(reply.tokens)]:
        raise Wrong(f"{name}: {reply.tokens} is not how {tokens} begins")
    if reply.output is None:
        if reply.raised is None:
            raise Wrong(f"{name}: no end, and nothing was raised: {reply.tokens} of {tokens}")
        return "raised to its caller"
    if _ending(reply) == true[name]:
        return "right" if error is None else "right, with the error of its own"
    if not (reply.output.error or "").startswith(may_end or ("none may end it",)):
        raise Wrong(f"{name}: {_ending(reply)} instead of {true[name]}")
    return "ended with the fault as its error"


def check_nothing_is_leaked(engine: Engine) -> None:
    try:
        _check_nothing_is_leaked(engine)
    except Wrong:  # an exception may still keep a frame alive, and this a stream
        gc.collect()
        engine.step([])
        _check_nothing_is_leaked(engine)


def _check_nothing_is_leaked(engine: Engine) -> None:
    loop, left = engine.loop, engine.loop.current
    kept = {
        "waiting": left.waiting,
        "running": dict(left.running),
        "increments": left.increments,
        "suspects": dict(left.suspects),
        "pages held": dict(left.book.held),
        "known to the drafters": loop.drafters.known,
        "observers": loop.device.observers,
    }
    proposer, adaptive = loop.drafters.proposer, loop.drafters.adaptive
    if proposer is not None:
        kept["kept by the proposer"] = getattr(proposer, "tokens", None) or getattr(
            proposer, "lookups", None
        )
    if adaptive is not None:
        kept["kept by the choice of width"] = adaptive.outcomes
        if adaptive.of_requests is not None:
            of_requests = adaptive.of_requests
            kept["kept to share out tokens"] = {*of_requests._counts, *of_requests._unread}
    if found := {name: what for name, what in kept.items() if what}:
        raise Wrong(f"leaked: {found}")
    if sorted(left.book.free) != list(range(1, loop.plan.num_pages)):
        raise Wrong(f"pages are missing: {left.book.free}")
    check_book(left.book, loop.plan.num_pages)
    state = loop.device.state
    if isinstance(state, FakeState) and loop.trusted and not state.deleted:
        check_contents(left.book, state.cells, state.context)
        if left.book.index.states is not None:
            check_states(left.book, state.states, loop.plan.first_snapshot)


# Raising at a line


def counted(action: Callable[[], object]) -> dict[Line, int]:
    """How often every line of the engine runs. Lines are in the order of their first runs."""
    hits: collections.Counter[Line] = collections.Counter()

    def on_line(code: CodeType, line: int) -> object:
        if not _is_ours(code):
            return sys.monitoring.DISABLE
        hits[code, line] += 1
        return None

    with _monitored(on_line):
        action()
    return dict(hits)


def _is_ours(code: CodeType) -> bool:
    path = Path(code.co_filename)
    return path.is_relative_to(ROOM) and path not in LEFT_OUT


@contextmanager
def _monitored(on_line: Callable[[CodeType, int], object], code: CodeType | None = None):
    monitoring, tool = sys.monitoring, sys.monitoring.DEBUGGER_ID
    monitoring.use_tool_id(tool, "sweep")
    monitoring.register_callback(tool, monitoring.events.LINE, on_line)
    try:
        if code is None:
            monitoring.set_events(tool, monitoring.events.LINE)
        else:
            monitoring.set_local_events(tool, code, monitoring.events.LINE)
        monitoring.restart_events()
        yield
    finally:
        if code is None:
            monitoring.set_events(tool, 0)
        else:
            monitoring.set_local_events(tool, code, 0)
        monitoring.register_callback(tool, monitoring.events.LINE, None)
        monitoring.free_tool_id(tool)


@dataclasses.dataclass(frozen=True)
class Injection:
    """An exception at one line."""

    line: Line
    error: type[BaseException]
    first: int
    """In which run of the line, counted from 1, the exception is raised."""
    always: bool = False
    """Whether it is also raised in every run after that."""

    def __str__(self) -> str:
        code, line = self.line
        when = f"from run {self.first} on" if self.always else f"at run {self.first}"
        return f"{self.error.__name__} {when} of {Path(code.co_filename).name}:{line}"


@contextmanager
def injected(injection: Injection) -> Iterator[list[int]]:
    """Raises the exception inside the block. Yields the runs of the line in which it did."""
    hits, raised = 0, []

    def on_line(code: CodeType, line: int) -> None:
        nonlocal hits
        if line != injection.line[1]:
            return
        hits += 1
        if hits > MOST_HITS:
            raise Spins(f"{hits} runs of {injection}")
        if hits == injection.first or (injection.always and hits > injection.first):
            raised.append(hits)
            raise injection.error(f"injected: {injection}")

    with _monitored(on_line, injection.line[0]):
        yield raised


def outcomes(
    engine: Engine, asks: Asks, true: Truth, injection: Injection, second_fault: bool = False
) -> collections.Counter[str]:
    """Runs the scenario with a fault, checks everything, and returns how the requests ended. A
    second fault may end a request, because after the first one it steps alone."""
    limit = StepLimit()
    engine.loop.device.observers.append(limit)
    with warnings.catch_warnings(record=True) as told, injected(injection) as raised:
        warnings.simplefilter("always")
        replies = run(engine, asks, unheard := [])
    engine.loop.device.observers.remove(limit)
    for one in unheard:
        one.abort()
    if any("release of request" in str(one.message) for one in told):
        if isinstance(proposer := engine.loop.drafters.proposer, Guesser):
            proposer.tokens.clear()  # if its release raises, it must clear up itself
    # If there is no memory for new pools, the error is a LoadError that says what to lower.
    errors = (injection.error.__name__, "LoadError", "Fault")
    may_end = errors if injection.always or second_fault else ()
    ends = collections.Counter(
        check_reply(name, reply, true, may_end) for name, reply in replies.items()
    )
    check_reply("after", after(engine, asks), true)
    check_nothing_is_leaked(engine)
    if not raised:
        ends["was not reached"] += 1
    return ends


def injections(lines: dict[Line, int]) -> Iterator[Injection]:
    """Injections for every line: both exceptions in its first, middle and last run, and MemoryError
    in all runs from the first or from the middle one on."""
    for line, count in lines.items():
        for first in sorted({1, (count + 1) // 2, count}):
            for error in (KeyboardInterrupt, MemoryError):
                yield Injection(line, error, first)
            if first < count or count == 1:
                yield Injection(line, MemoryError, first, always=True)


# Real signals


def interrupted_at_random(
    engine: Engine, asks: Asks, true: Truth, seed: int, longest_s: float
) -> collections.Counter[str]:
    """Runs the scenario while a timer sends one signal after a random time."""
    limit = StepLimit()
    engine.loop.device.observers.append(limit)

    def interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    missed, unheard = False, []
    try:
        signal.setitimer(signal.ITIMER_REAL, random.Random(seed).uniform(1e-5, longest_s))
        replies = run(engine, asks, unheard)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:  # it came in this file, between two calls of the engine
        missed, replies = True, {}
    finally:
        signal.signal(signal.SIGALRM, before)
    engine.loop.device.observers.remove(limit)
    for one in unheard:
        one.abort()
    ends = collections.Counter(check_reply(name, reply, true) for name, reply in replies.items())
    if missed:  # the scenario itself was cut off: its requests may still run
        ends["outside of the engine"] += 1
        return ends
    check_reply("after", after(engine, asks), true)
    check_nothing_is_leaked(engine)
    return ends
