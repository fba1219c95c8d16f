"""The host loop: requests in, increments out, one transaction per step."""

import collections
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import jax
import numpy as np

from jaxspec.engine.adapt.width import AdaptiveWidth
from jaxspec.engine.plan.plan import Plan
from jaxspec.engine.requests.advance import emit, end
from jaxspec.engine.requests.request import Increment, Request
from jaxspec.engine.schedule import pages
from jaxspec.engine.step.io import StepResult
from jaxspec.engine.step.programs import Device
from jaxspec.engine.step.state import EngineState
from jaxspec.engine.step.upload import logprobs_of, padded, prompt_chunk, seat_of
from jaxspec.proposers.methods import HostProposer
from jaxspec.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Flight:
    """A step that was launched and whose result the host has not read yet."""

    requests: tuple[int, ...]
    """Request of every row."""
    result: StepResult
    unfinished_prompts: frozenset[int] = frozenset()
    """Requests whose prompt goes on: the token after this chunk is not theirs."""


class Loop:
    """Live requests over one device state. A driver decides how a step's programs are cut."""

    def __init__(
        self,
        device: Device,
        new_state: Callable[[], EngineState],
        plan: Plan,
        driver: Callable[["Loop"], None],
        tokenizer: Tokenizer | None,
        proposer: HostProposer | None = None,
        spans: AdaptiveWidth | None = None,
    ):
        self.device = device
        self.new_state = new_state
        self.plan = plan
        self.driver = driver
        self.tokenizer = tokenizer
        self.proposer = proposer
        self.spans = spans
        self.book = pages.new_book(plan.num_pages, plan.page_size)
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}
        self.flights: deque[Flight] = deque()
        self.increments: deque[Increment] = deque()
        self.finished: dict[int, Request] = {}
        self.stepping: tuple[int, ...] = ()
        """Requests of the program being launched or read."""
        self.suspects: dict[int, int] = {}
        """Requests of a failed step, with the tokens they had; each steps alone, until a token
        more or another failure makes clear whose fault it was."""
        self.torn = False
        """Whether the device's state may be lost, or ahead of what the host has read of it."""

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.running or self.flights)

    def submit(self, request: Request) -> None:
        self.waiting.append(request)

    def refuse(self, request: Request, reason: str) -> None:
        """Ends a request that was never let in."""
        self._tell(*end(request, "error", reason))

    def step(self) -> None:
        """One transaction: it counts whole, or not at all."""
        self.stepping = ()
        try:
            if self.torn:
                self._begin_anew()
            self.driver(self)
            if self.suspects:
                self.land_all()
                self._clear_suspects()
        except Exception as error:
            self._undo(error)
        except BaseException:  # Ctrl-C, at any line
            self.torn = True
            raise

    def take_increments(self, of: Iterable[int]) -> list[Increment]:
        """What was told of these requests since the last call; the others' is kept for them."""
        wanted = set(of)
        taken = [increment for increment in self.increments if increment.request in wanted]
        self.increments = deque(i for i in self.increments if i.request not in wanted)
        return taken

    def forget(self, id: int) -> None:
        """Drops what is kept of an ended request."""
        self.finished.pop(id, None)
        self.take_increments([id])

    # Admission

    def admit(self) -> None:
        """Gives slots and pages to those who wait, in their order, as long as both last."""
        taken = {request.slot for request in self.running.values()}
        free = [slot for slot in range(self.plan.num_slots) if slot not in taken]
        while self.waiting and free and not self.suspects:
            request = self.waiting[0]
            rows = self.plan.rows_of(request)
            if not pages.can_admit(self.book, rows):
                return
            book = pages.admit(self.book, request.id, rows)
            request = replace(request, slot=free.pop(0), seated_at=time.perf_counter())
            self.book = book
            self.waiting.popleft()
            self.running[request.id] = request
            self.stepping = (request.id,)
            try:
                self._seat(request)
            except Exception:
                self.torn = True
                raise

    def _seat(self, request: Request) -> None:
        held = self.book.held[request.id].pages
        self.device.run("seat_step", seat_of(request, held, self.device.state))

    # Launching

    def read_prompts(self) -> None:
        """Launches the next chunk of the prompts that came first."""
        unread = [request for request in self._candidates() if not request.is_prefilled]
        if not unread:
            return
        left = [len(request.context) - request.prefilled for request in unread]
        rows, width = self.plan.shapes.prefill_for(left)
        chosen = unread[:rows]
        self.stepping = tuple(request.id for request in chosen)
        chunk = prompt_chunk(chosen, rows, width, self.plan.num_slots)
        result = self.device.run("prefill_step", chunk, draws=self.draws(chosen))
        for request in chosen:
            self._propose_after(
                request, request.context[request.prefilled : request.prefilled + width]
            )
        read = [replace(r, prefilled=min(r.prefilled + width, len(r.context))) for r in chosen]
        self.running.update({request.id: request for request in read})
        going_on = frozenset(request.id for request in read if not request.is_prefilled)
        self._fly(Flight(self.stepping, result, going_on))

    def decoding(self) -> list[Request]:
        """Requests whose prompts have been read and whose budget is not sure to be spent."""
        flying = collections.Counter(id for flight in self.flights for id in flight.requests)
        ready = [
            request
            for request in self._candidates()
            if request.is_prefilled
            and len(request.token_ids) + flying[request.id] < request.params.max_tokens
        ]
        self.stepping = tuple(request.id for request in ready)
        return ready

    def slots(self, requests: list[Request]) -> jax.Array:
        """Their slots as a step takes them, padded to a compiled number of rows."""
        slots = tuple(request.slot for request in requests)
        return padded(slots, self.plan.shapes.rows_for(len(slots)), self.plan.num_slots)

    def draws(self, requests: list[Request]) -> bool:
        """Whether their step must draw; with `exact` every step is made as if it had to."""
        return self.plan.exact or any(request.params.draws for request in requests)

    def fly(self, requests: list[Request], result: StepResult) -> None:
        """Notes a launched step whose result is still to be read."""
        self._fly(Flight(tuple(request.id for request in requests), result))

    def _fly(self, flight: Flight) -> None:
        for leaf in jax.tree.leaves(flight.result):
            leaf.copy_to_host_async()
        self.flights.append(flight)

    def _propose_after(
        self, request: Request, tokens: tuple[int, ...], num_drafts: int = 0, accepted: int = 0
    ) -> None:
        for listener in self._listeners() if request.params.speculate else ():
            listener.commit(request.id, tokens, num_drafts, accepted)

    def _release_proposals(self, id: int) -> None:
        for listener in self._listeners():
            listener.release(id)

    def _listeners(self) -> list[HostProposer | AdaptiveWidth]:
        return [listener for listener in (self.proposer, self.spans) if listener is not None]

    def _candidates(self) -> list[Request]:
        if self.suspects:
            return [self.running[next(iter(self.suspects))]]
        return list(self.running.values())

    # Landing

    def land(self, flight: Flight) -> None:
        """Reads a step's result, gives every request its tokens and notes their rows."""
        self.stepping = flight.requests
        result = jax.tree.map(np.asarray, flight.result)
        now = time.perf_counter()
        for row, id in enumerate(flight.requests):
            if id in self.running and id not in flight.unfinished_prompts and result.emitted[row]:
                request, increment = self._with_tokens(self.running[id], result, row, now)
                drafts, accepted = int(result.num_drafts[row]), int(result.emitted[row]) - 1
                self._propose_after(request, increment.token_ids, drafts, accepted)
                self._tell(request, increment)
        rows = {id: self.running[id].committed for id in flight.requests if id in self.running}
        self.book = pages.commit(self.book, rows)

    def _with_tokens(
        self, request: Request, result: StepResult, row: int, now: float
    ) -> tuple[Request, Increment]:
        tokens = result.tokens[row, : result.emitted[row]].tolist()
        logprobs = logprobs_of(request, result.logprobs, row, tokens)
        drafts = int(result.num_drafts[row])
        try:
            return emit(request, tokens, drafts, logprobs, self.tokenizer, now)
        except Exception as error:  # in its own text or stop strings: nobody else's fault
            return end(request, "error", _reason(error))

    def land_all(self, but: int = 0) -> None:
        """Reads every step in flight but the newest few."""
        while len(self.flights) > but:
            flight = self.flights.popleft()
            try:
                self.land(flight)
            except BaseException:
                self.torn = True
                raise

    def _tell(self, request: Request, increment: Increment) -> None:
        self.increments.append(increment)
        if request.finish_reason is None:
            self.running[request.id] = request
            return
        self.running.pop(request.id, None)
        self.finished[request.id] = request
        self._release_proposals(request.id)
        if request.id in self.book.held:
            self.book = pages.release(self.book, request.id)

    def abort(self, ids: Iterable[int]) -> None:
        """Ends requests now. What they have in flight lands on nobody."""
        self._end(set(ids), "abort")

    def _end(self, ids: set[int], reason: str, error: str | None = None) -> None:
        for request in [r for r in (*self.waiting, *self.running.values()) if r.id in ids]:
            self._tell(*end(request, reason, error))
        self.waiting = deque(request for request in self.waiting if request.id not in ids)
        self._clear_suspects()

    # Faults

    def _undo(self, error: Exception) -> None:
        """After a step that raised: nothing of it counts; find out whose fault it was.

        What was launched before is read. If a program died with the state in its hands, the next
        step makes the pools anew and every live request is read again from its tokens.
        """
        stepping = self.stepping
        self.torn |= self.device.lost_its_state()
        try:
            self.land_all()
        except Exception:  # what was in flight died with the program that failed
            self.torn = True
        if not stepping:
            raise error
        self._blame(stepping, error)

    def _blame(self, stepping: tuple[int, ...], error: Exception) -> None:
        """A step is repeated with each of its requests alone; one that fails again is at fault."""
        if self.suspects:
            self._end(set(stepping), "error", _reason(error))
        else:
            live = [id for id in stepping if id in self.running]
            self.suspects = {id: len(self.running[id].token_ids) for id in live}

    def _clear_suspects(self) -> None:
        """A request that has gone on by a token, or has ended, is not suspected any more."""
        self.suspects = {
            id: had
            for id, had in self.suspects.items()
            if id in self.running and len(self.running[id].token_ids) == had
        }

    def _begin_anew(self) -> None:
        """New pools for the live requests, each to be read again from its tokens."""
        self.flights.clear()
        self.device.state = None  # the old pools and the new need not fit side by side
        self.device.state = self.new_state()
        for id, request in self.running.items():
            self.running[id] = replace(request, prefilled=0, resumed=len(request.token_ids))
            self._release_proposals(id)
            self._seat(self.running[id])
        self.torn = False


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
