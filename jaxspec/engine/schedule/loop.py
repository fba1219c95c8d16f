"""The host loop: requests in, increments out, one transaction per step."""

import collections
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import jax
import numpy as np

from jaxspec.engine.adapt.width import AdaptiveWidth
from jaxspec.engine.plan.plan import Plan
from jaxspec.engine.requests.advance import emit
from jaxspec.engine.requests.request import Increment, NewTokens, Request
from jaxspec.engine.schedule import ledger
from jaxspec.engine.schedule.abandoned import Abandoned
from jaxspec.engine.schedule.decode import choose_decode, decode_inputs, launch_decode
from jaxspec.engine.schedule.drafters import Drafters
from jaxspec.engine.schedule.ledger import Launched, Ledger
from jaxspec.engine.schedule.pages import can_admit, new_book
from jaxspec.engine.schedule.turn import Turn, in_turn
from jaxspec.engine.step.device import Device
from jaxspec.engine.step.io import StepResult
from jaxspec.engine.step.state import EngineState, occupied
from jaxspec.engine.step.steps import admit_step, prefill_step
from jaxspec.engine.step.upload import admission_of, logprobs_of, prompt_chunk
from jaxspec.errors import UsageError
from jaxspec.proposers.methods import HostProposer
from jaxspec.text.tokenizer import Tokenizer


class Loop:
    """Live requests over one device state. Threads take turns."""

    def __init__(
        self,
        device: Device,
        new_state: Callable[[], EngineState],
        plan: Plan,
        tokenizer: Tokenizer | None,
        proposer: HostProposer | None = None,
        adaptive: AdaptiveWidth | None = None,
    ):
        self.device = device
        self.new_state = new_state
        self.plan = plan
        self.tokenizer = tokenizer
        self.drafters = Drafters(proposer, adaptive)
        book = new_book(plan.num_pages, plan.page_size)
        self.ledger = Ledger(book, plan.block_size - 1, device.models.synthetic)
        """Replaced as a whole, by the thread whose turn it is. Anyone may read it at any time."""
        self.turn = Turn()
        self.abandoned = Abandoned()
        """Requests that the ledger may still have and the next call drops."""
        self.trusted = True
        """Whether the device's state, and what the drafters know, is what the ledger says."""
        self.tried: tuple[int, ...] = ()
        """Requests of the program that is being launched or read."""
        self.closed = False
        """Whether the device's memory was given back, so that nothing can run any more."""

    @property
    def current(self) -> Ledger:
        """The ledger without requests that were abandoned."""
        gone = self.abandoned.oldest(len(self.abandoned.queue))
        return ledger.dropped(self.ledger, gone) if gone else self.ledger

    @property
    def idle(self) -> bool:
        return self.current.is_idle

    # What callers do, one at a time

    @in_turn
    def submit(self, requests: Sequence[Request], refusals: Sequence[str | None]) -> None:
        """Adds requests, all or none of them. Those with a reason for refusal end at once."""
        self.refuse_if_closed()
        pairs = list(zip(requests, refusals, strict=True))
        waiting = ledger.submitted(self.ledger, [r for r, reason in pairs if reason is None])
        self.ledger = ledger.refused(waiting, [(r, reason) for r, reason in pairs if reason])

    @in_turn
    def step(self) -> None:
        """Runs one step of all requests."""
        self.refuse_if_closed()
        self._drop_abandoned()
        self._step_or_fail()

    @in_turn
    def take_or_step(self, of: set[int], into: deque[Increment]) -> bool:
        """Moves the increments of these requests to `into`. If there are none, runs a step. Returns
        whether there are some, or may be later."""
        self.refuse_if_closed()
        self._drop_abandoned()
        self._take(of, into)
        if not into and not self.ledger.is_idle:
            self._step_or_fail()
            self._take(of, into)
        return bool(into) or not self.ledger.is_idle

    @in_turn
    def step_and_take(self, of: set[int], into: deque[Increment]) -> None:
        """Runs one step, and moves the increments of these requests to `into`."""
        self.refuse_if_closed()
        self._drop_abandoned()
        if not self.ledger.is_idle:
            self._step_or_fail()
        self._take(of, into)

    @in_turn
    def give_back(self, increments: Sequence[Increment]) -> None:
        """Takes increments back that their caller did not get."""
        self.ledger = ledger.given_back(self.ledger, increments)

    @in_turn
    def abort(self, ids: Iterable[int]) -> None:
        """Ends requests now. Their last increments say so."""
        self.ledger = ledger.ended(self.ledger, set(ids), "abort")
        self.drafters.release_all_but(self.ledger.running)

    @in_turn
    def close(self) -> None:
        """Drops all requests and frees the device's memory. An interrupted call can be repeated."""
        self.closed = True
        self.ledger = ledger.emptied(self.ledger)
        self.drafters.release_all_but(())
        self.device.free()

    def refuse_if_closed(self) -> None:
        if self.closed:
            raise UsageError("the engine is closed; make a new one with Engine.from_pretrained")

    def abandon(self, ids: Iterable[int]) -> None:
        """Drops requests now, or inside a callback of the loop, when the step has ended."""
        self.abandoned.add(tuple(ids))
        if not self.turn.is_mine:
            self._settle()

    @in_turn
    def _settle(self) -> None:
        self._drop_abandoned()

    def _drop_abandoned(self) -> None:
        if count := len(self.abandoned.queue):
            self.ledger = ledger.dropped(self.ledger, self.abandoned.oldest(count))
            self.abandoned.forget(count)
            self.drafters.release_all_but(self.ledger.running)

    def _take(self, of: set[int], into: deque[Increment]) -> None:
        increments = ledger.untaken(self.ledger, of)
        into.extend(increments)
        self.ledger = ledger.taken(self.ledger, increments)

    def wait(self) -> None:
        """Waits until the device has run everything that was launched."""
        with nullcontext() if self.turn.is_mine else self.turn.held():
            leaves = jax.tree.leaves(self.device.state)
            jax.block_until_ready([leaf for leaf in leaves if not leaf.is_deleted()])

    @contextmanager
    def lend_device(self) -> Iterator[Device]:
        """The device of an idle loop. Whoever borrows it has to return it without requests."""
        with self.turn.held():
            self.refuse_if_closed()
            self._drop_abandoned()
            if not self.ledger.is_idle:
                raise UsageError("the engine has requests; borrow its device when they have ended")
            trusted, self.trusted = self.trusted, False
            if not trusted:
                self._begin_anew()
            self.read_results()  # of a step that was launched before the last reply was read
            yield self.device
            self.device.state = occupied(self.device.state, batch=0, context=0, limit=0)
            self.trusted = True

    # A step

    def _step_or_fail(self) -> None:
        """Runs one step as a transaction: all of it takes effect, or nothing.

        Whatever is raised, the ledger is the one of before or after a transition. The device is
        trusted only between two steps that ended well; otherwise the next step begins anew.
        """
        self.tried = ()
        trusted, self.trusted = self.trusted, False
        try:
            if not trusted:
                self._begin_anew()
            self._observed_step()
        except Exception as error:
            if self.ledger.is_idle:
                raise
            self.ledger = ledger.failed(self.ledger, self.tried, _reason(error))
        else:
            self.trusted = True

    def _observed_step(self) -> None:
        for observer in tuple(self.device.observers):
            observer.step_begins(len(self.ledger.running))
        self._step()
        for observer in tuple(self.device.observers):
            observer.step_ends()

    def _step(self) -> None:
        """Launches a decode step, then reads the results of the step before it. If the host takes
        part in the decode step, all earlier results are read first."""
        if self.ledger.waiting:
            self._admit()
        in_flight = len(self.ledger.launched)
        if unread := [r for r in self._candidates() if not r.is_prefilled]:
            self._prefill(unread)
        if self.plan.reads_before_decoding:
            self.read_results()
            in_flight = 0
        if ready := self._ready_to_decode():
            self._decode(ready)
        lockstep = self.plan.driver == "lockstep" or self.ledger.suspects
        self.read_results(but=0 if lockstep else len(self.ledger.launched) - in_flight)

    # Admission

    def _admit(self) -> None:
        """Gives slots and pages to waiting requests, in their order, while there are enough."""
        used = {request.slot for request in self.ledger.running.values()}
        free = [slot for slot in range(self.plan.num_slots) if slot not in used]
        while free and (request := self._next_to_admit()):
            positions = self.plan.positions_of(request.length_limit)
            if not can_admit(self.ledger.book, positions):
                break
            self.tried = (request.id,)
            self.ledger = ledger.admitted(
                self.ledger, free.pop(0), positions, self.device.clock.now()
            )
            self._admit_on_device(request.id)
        assert self.ledger.running, "requests wait although nothing runs"

    def _next_to_admit(self) -> Request | None:
        """The first waiting request; while there are suspects, only if it is one."""
        first, suspects = next(iter(self.ledger.waiting), None), self.ledger.suspects
        return None if first and suspects and first.id not in suspects else first

    def _admit_on_device(self, id: int) -> None:
        request, held = self.ledger.running[id], self.ledger.book.held[id]
        self.device.run(admit_step, admission_of(request, held, self.plan.max_pages))

    # Launching

    def _prefill(self, unread: list[Request]) -> None:
        """Launches the next chunk of the prompts that came first."""
        left = [len(request.context) - request.prefilled for request in unread]
        batch, width = self.plan.shapes.prefill_for(left)
        chosen = unread[:batch]
        self.tried = tuple(request.id for request in chosen)
        draws = self.plan.exact or any(request.draws for request in chosen)
        chunk = prompt_chunk(chosen, batch, width, self.plan.num_slots)
        result = self.device.run(prefill_step, chunk, draws=draws)
        after = [replace(r, prefilled=min(r.prefilled + width, len(r.context))) for r in chosen]
        for before, request in zip(chosen, after):
            if request.params.speculate:
                self.drafters.commit(request.id, _newly_read(before, request))
        silent = frozenset(r.id for r in after if r.resumed or not r.is_prefilled)
        self._note_launched(Launched(self.tried, result, silent), after)

    def _decode(self, requests: list[Request]) -> None:
        """Launches a decode step of these requests."""
        self.tried = tuple(request.id for request in requests)
        choice = choose_decode(self.plan, self.drafters, requests)
        inputs = decode_inputs(self.device, self.plan, choice, requests)
        result = launch_decode(self.device, choice.programs, inputs)
        self._note_launched(Launched(self.tried, result))

    def _ready_to_decode(self) -> list[Request]:
        """Requests whose prompts have been read and that may have budget left."""
        steps = self.ledger.launched
        unread = collections.Counter(id for s in steps for id in s.requests if id not in s.silent)
        return [
            request
            for request in self._candidates()
            if request.is_prefilled
            and len(request.token_ids) + unread[request.id] < request.params.max_tokens
        ]

    def _candidates(self) -> list[Request]:
        """The running requests; if some are suspects, only the first of these."""
        running = self.ledger.running
        if not self.ledger.suspects:
            return list(running.values())
        return [running[id] for id in [*self.ledger.suspects][:1] if id in running]

    def _note_launched(self, step: Launched, prompts: Sequence[Request] = ()) -> None:
        for leaf in jax.tree.leaves(step.result):
            leaf.copy_to_host_async()
        self.ledger = ledger.launched(self.ledger, step, prompts)

    # Reading results

    def read_results(self, but: int = 0) -> None:
        """Reads the results of every launched step, except the newest `but` steps."""
        while len(self.ledger.launched) > but:
            self._read(self.ledger.launched[0])

    def _read(self, step: Launched) -> None:
        """Adds the tokens of the oldest launched step to its requests."""
        self.tried = step.requests
        result = jax.tree.map(np.asarray, step.result)
        now, running = self.device.clock.now(), self.ledger.running
        progress = [
            self._progress(running[id], result, index, now)
            for index, id in enumerate(step.requests)
            if id in running and id not in step.silent
        ]
        self.ledger = ledger.read(self.ledger, progress)
        if any(increment.ended for _, increment in progress):
            self.drafters.release_all_but(self.ledger.running)

    def _progress(
        self, request: Request, result: StepResult, index: int, now: float
    ) -> tuple[Request, Increment]:
        tokens, logprobs = result.tokens[index, : result.emitted[index]].tolist(), []
        assert tokens, "a request with budget left took no part in its step"
        if (wanted := request.params.logprobs) is not None:
            logprobs = logprobs_of(wanted, result.logprobs, index, tokens)
        drafts = int(result.num_drafts[index])
        new = NewTokens(tokens, drafts, logprobs, now)
        request, increment = emit(request, new, self.tokenizer)
        if request.params.speculate:
            self.drafters.commit(request.id, increment.token_ids, drafts, len(tokens) - 1)
        return request, increment

    # Beginning anew

    def _begin_anew(self) -> None:
        """Makes new pools. Every running request will be prefilled again from its tokens."""
        self.ledger = ledger.begun_anew(self.ledger)
        self.drafters.release_all_but(())
        self.device.discard_state()  # the old pools and the new need not fit side by side
        self.device.state = self.new_state()
        for id in self.ledger.running:
            self._admit_on_device(id)


def _newly_read(before: Request, after: Request) -> tuple[int, ...]:
    """The tokens of a chunk, and at its end the token after it if that is known already."""
    tokens, known = after.context[before.prefilled : after.prefilled], after.known_next
    return tokens if known is None or not after.is_prefilled else (*tokens, known)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(": ")
