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
from jaxspec.engine.requests.request import Increment, NewTokens, Request
from jaxspec.engine.schedule import pages
from jaxspec.engine.schedule.decode import (
    Drafters,
    choose_decode,
    decode_inputs,
    launch_decode,
)
from jaxspec.engine.step.device import Device
from jaxspec.engine.step.io import StepResult
from jaxspec.engine.step.state import EngineState
from jaxspec.engine.step.steps import admit_step, prefill_step
from jaxspec.engine.step.upload import admission_of, logprobs_of, prompt_chunk
from jaxspec.proposers.methods import HostProposer
from jaxspec.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Launched:
    """A step that was launched and whose result the host has not read yet."""

    requests: tuple[int, ...]
    """Ids of the requests in its batch, in order."""
    result: StepResult
    unfinished_prompts: frozenset[int] = frozenset()
    """Requests whose prompt continues after this chunk: the step's token is not emitted for them.
    """


class Loop:
    """Live requests over one device state."""

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
        self.book = pages.new_book(plan.num_pages, plan.page_size)
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}
        self.launched: deque[Launched] = deque()
        """Steps whose results are still to be read, oldest first."""
        self.increments: deque[Increment] = deque()
        self.finished: dict[int, Request] = {}
        self.stepping: tuple[int, ...] = ()
        """Requests of the program that is being launched or read."""
        self.suspects: dict[int, int] = {}
        """Requests of a failed step, with the number of tokens they had. Each of them runs in steps
        of its own until it has more tokens, or until it fails again and thus caused the failure."""
        self.state_lost = False
        """Whether the device's state may be lost, or may contain steps that the host never read."""

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.running or self.launched)

    def submit(self, request: Request) -> None:
        self.waiting.append(request)

    def refuse(self, request: Request, reason: str) -> None:
        """Ends a request that was never admitted."""
        self._publish(*end(request, "error", reason))

    def step(self) -> None:
        """Runs one step as a transaction: all of it takes effect, or nothing."""
        self.stepping = ()
        for observer in self.device.observers:
            observer.step_begins(len(self.running))
        try:
            if self.state_lost:
                self._begin_anew()
            self._step()
        except Exception as error:
            self._undo(error)
        except BaseException:  # Ctrl-C, at any line
            self.state_lost = True
            raise
        for observer in self.device.observers:
            observer.step_ends()

    def _step(self) -> None:
        """Launches a decode step, then reads the results of the step before it. If the host takes
        part in the decode step, all earlier results are read first."""
        if self.waiting:
            self._admit()
        in_flight = len(self.launched)
        if unread := [r for r in self._candidates() if not r.is_prefilled]:
            self._prefill(unread)
        if self.plan.reads_before_decoding:
            self.read_results()
            in_flight = 0
        if ready := self._ready_to_decode():
            self._decode(ready)
        lockstep = self.plan.driver == "lockstep" or self.suspects
        self.read_results(but=0 if lockstep else len(self.launched) - in_flight)
        if self.suspects:
            self._clear_suspects()

    def take_increments(self, of: Iterable[int]) -> list[Increment]:
        """The increments of these requests since the last call. Those of others are kept."""
        wanted = set(of)
        taken = [increment for increment in self.increments if increment.request in wanted]
        self.increments = deque(i for i in self.increments if i.request not in wanted)
        return taken

    def forget(self, id: int) -> None:
        """Drops the record of a request that has ended."""
        self.finished.pop(id, None)
        self.take_increments([id])

    # Admission

    def _admit(self) -> None:
        """Gives slots and pages to waiting requests, in their order, while there are enough."""
        taken = {request.slot for request in self.running.values()}
        free = [slot for slot in range(self.plan.num_slots) if slot not in taken]
        while self.waiting and free and not self.suspects:
            request = self.waiting[0]
            positions = self.plan.positions_of(request.length_limit)
            if not pages.can_admit(self.book, positions):
                return
            book = pages.admit(self.book, request.id, positions)
            request = replace(request, slot=free.pop(0), seated_at=time.perf_counter())
            self.book = book
            self.waiting.popleft()
            self.running[request.id] = request
            self.stepping = (request.id,)
            try:
                self._admit_on_device(request)
            except Exception:
                self.state_lost = True
                raise

    def _admit_on_device(self, request: Request) -> None:
        held = self.book.held[request.id]
        self.device.run(admit_step, admission_of(request, held, self.plan.max_pages))

    # Launching

    def _prefill(self, unread: list[Request]) -> None:
        """Launches the next chunk of the prompts that came first."""
        left = [len(request.context) - request.prefilled for request in unread]
        batch, width = self.plan.shapes.prefill_for(left)
        chosen = unread[:batch]
        self.stepping = tuple(request.id for request in chosen)
        draws = self.plan.exact or any(request.draws for request in chosen)
        chunk = prompt_chunk(chosen, batch, width, self.plan.num_slots)
        result = self.device.run(prefill_step, chunk, draws=draws)
        for request in chosen:
            tokens = request.context[request.prefilled : request.prefilled + width]
            if request.params.speculate:
                self.drafters.commit(request.id, tokens)
        read = [replace(r, prefilled=min(r.prefilled + width, len(r.context))) for r in chosen]
        self.running.update({request.id: request for request in read})
        unfinished = frozenset(request.id for request in read if not request.is_prefilled)
        self._note_launched(Launched(self.stepping, result, unfinished))

    def _decode(self, requests: list[Request]) -> None:
        """Launches a decode step of these requests."""
        self.stepping = tuple(request.id for request in requests)
        choice = choose_decode(self.plan, self.drafters, requests)
        inputs = decode_inputs(self.device, self.plan, choice, requests)
        result = launch_decode(self.device, choice.programs, inputs)
        self._note_launched(Launched(self.stepping, result))

    def _ready_to_decode(self) -> list[Request]:
        """Requests whose prompts have been read and that may have budget left."""
        unread = collections.Counter(id for step in self.launched for id in step.requests)
        return [
            request
            for request in self._candidates()
            if request.is_prefilled
            and len(request.token_ids) + unread[request.id] < request.params.max_tokens
        ]

    def _candidates(self) -> list[Request]:
        if self.suspects:
            return [self.running[next(iter(self.suspects))]]
        return list(self.running.values())

    def _note_launched(self, step: Launched) -> None:
        for leaf in jax.tree.leaves(step.result):
            leaf.copy_to_host_async()
        self.launched.append(step)

    # Reading results

    def read_results(self, but: int = 0) -> None:
        """Reads the results of every launched step, except the newest `but` steps."""
        while len(self.launched) > but:
            step = self.launched.popleft()
            try:
                self._read(step)
            except BaseException:
                self.state_lost = True
                raise

    def _read(self, step: Launched) -> None:
        """Adds the tokens of a step to its requests."""
        self.stepping = step.requests
        result = jax.tree.map(np.asarray, step.result)
        now = time.perf_counter()
        for index, id in enumerate(step.requests):
            emitted = int(result.emitted[index])
            if id in self.running and id not in step.unfinished_prompts and emitted:
                self._give_tokens(self.running[id], result, index, now)

    def _give_tokens(self, request: Request, result: StepResult, index: int, now: float) -> None:
        tokens, logprobs = result.tokens[index, : result.emitted[index]].tolist(), []
        if (wanted := request.params.logprobs) is not None:
            logprobs = logprobs_of(wanted, result.logprobs, index, tokens)
        drafts = int(result.num_drafts[index])
        new = NewTokens(tokens, drafts, logprobs, now)
        try:
            request, increment = emit(request, new, self.tokenizer)
        except Exception as error:  # the request's own text or stop strings; no other is affected
            request, increment = end(request, "error", _reason(error))
        if request.params.speculate:
            self.drafters.commit(request.id, increment.token_ids, drafts, len(tokens) - 1)
        self._publish(request, increment)

    def _publish(self, request: Request, increment: Increment) -> None:
        self.increments.append(increment)
        if request.finish_reason is None:
            self.running[request.id] = request
            return
        self.running.pop(request.id, None)
        self.finished[request.id] = request
        self.drafters.release(request.id)
        if request.id in self.book.held:
            self.book = pages.release(self.book, request.id)

    # Ending and failing

    def abort(self, ids: Iterable[int]) -> None:
        """Ends requests now. Results of launched steps that were not read yet are ignored."""
        self._end(set(ids), "abort")

    def _end(self, ids: set[int], reason: str, error: str | None = None) -> None:
        for request in [r for r in (*self.waiting, *self.running.values()) if r.id in ids]:
            self._publish(*end(request, reason, error))
        self.waiting = deque(request for request in self.waiting if request.id not in ids)
        self._clear_suspects()

    def _undo(self, error: Exception) -> None:
        """Undoes a step that raised, and begins to find out which request caused the failure.

        Results of earlier steps are still read. If a program failed after the state was donated to
        it, the next step makes new pools and prefills every live request again from its tokens.
        """
        stepping = self.stepping
        self.state_lost |= self.device.lost_its_state()
        try:
            self.read_results()
        except Exception:  # launched steps failed together with the program that raised
            self.state_lost = True
        if not stepping:
            raise error
        if self.suspects:  # then the failed step had a single request
            self._end(set(stepping), "error", _reason(error))
        else:
            live = [id for id in stepping if id in self.running]
            self.suspects = {id: len(self.running[id].token_ids) for id in live}

    def _clear_suspects(self) -> None:
        """Removes requests that have more tokens by now, or have ended, from the suspects."""
        self.suspects = {
            id: had
            for id, had in self.suspects.items()
            if id in self.running and len(self.running[id].token_ids) == had
        }

    def _begin_anew(self) -> None:
        """Makes new pools; every live request will be prefilled again from its tokens."""
        self.launched.clear()
        self.device.state = None  # the old pools and the new need not fit side by side
        self.device.state = self.new_state()
        for id, request in self.running.items():
            self.running[id] = replace(request, prefilled=0, resumed=len(request.token_ids))
            self.drafters.release(id)
            self._admit_on_device(self.running[id])
        self.state_lost = False


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
