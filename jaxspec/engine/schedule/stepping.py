"""One step of all requests: it gives slots to waiting requests, launches programs that read prompts
or a decode step, and reads earlier results. Pure functions in other files choose what to run."""

import collections
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax

from jaxspec.engine.adapt.loop_costs import Size
from jaxspec.engine.adapt.width import AdaptiveWidth
from jaxspec.engine.plan.plan import Plan
from jaxspec.engine.requests.request import Request
from jaxspec.engine.schedule import ledger
from jaxspec.engine.schedule.admission import Seat, choose_seat
from jaxspec.engine.schedule.beside import (
    choose_beside,
    choose_mixed,
    is_ready,
    launch_mixed,
)
from jaxspec.engine.schedule.decode import (
    DecodeChoice,
    choose_decode,
    decode_inputs,
    launch_decode,
)
from jaxspec.engine.schedule.drafters import Drafters, note_time
from jaxspec.engine.schedule.pages import PageBook, new_book
from jaxspec.engine.schedule.prefill import Allowance, Chunk, allowance_of, choose_prefill
from jaxspec.engine.schedule.record import Launched, Ledger
from jaxspec.engine.schedule.results import progress_in
from jaxspec.engine.schedule.saved_states import new_states
from jaxspec.engine.schedule.scoring import with_scores
from jaxspec.engine.step.device import Device, begin_copies
from jaxspec.engine.step.io import StepResult
from jaxspec.engine.step.state import EngineState
from jaxspec.engine.step.steps import admit_step, copy_step, prefill_step
from jaxspec.engine.step.upload import admission_of, prompt_chunk
from jaxspec.proposers.methods import HostProposer
from jaxspec.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Beginning:
    """A request that was given a slot in the ledger, and not yet on the device."""

    request: Request
    found: Sequence[int]
    """Tokens of its text that were found in the cache."""
    saved_row: int | None
    """The saved state from which it begins, if any."""


class Stepping:
    """The live requests of one device state, and the step that continues them.

    If a step raises, the ledger is that of before or after a transition, but the device may be
    ahead of it. `Loop` makes the step a transaction.
    """

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
        states = new_states(plan.num_snapshots, plan.saves_every) if plan.num_snapshots else None
        book = new_book(plan.num_pages, plan.page_size, plan.looks_ahead, states)
        self.ledger = Ledger(
            book,
            plan.block_size - 1,
            device.models.synthetic,
            prefix_caching=plan.prefix_caching,
            exact=plan.exact,
        )
        """Replaced as a whole, by the thread whose turn it is. Anyone may read it at any time."""
        self.no_seat: tuple[Sequence[Request], PageBook, int] | None = None
        """When no waiting request could get a slot: the waiting requests, the page book, and the
        number of prompt tokens read. As long as these are the same, none can get one now."""
        self.tried: tuple[int, ...] = ()
        """Requests of the program that is being launched or read."""

    def _step(self) -> None:
        """Launches programs that read prompts, or else a decode step; then reads the results of
        what was launched before. If the host takes part in the decode step, it reads them first."""
        in_flight = len(self.ledger.launched)
        if not self._read_prompts():
            if self.plan.reads_before_decoding:
                self.read_results()
                in_flight = 0
            if ready := self._ready_to_decode():
                self._decode(ready)
        lockstep = self.plan.driver == "lockstep" or self.ledger.suspects
        self.read_results(but=0 if lockstep else len(self.ledger.launched) - in_flight)

    # Admission

    def _admit_some(self) -> None:
        """Gives slots and pages to as many waiting requests as the next program can read. The rest
        come later, because an idle device would wait until all of them were admitted."""
        beginning = []
        most = self.plan.shapes.largest_prefill
        while len(beginning) < most and (seat := self._next_seat()):
            self.tried = (seat.request.id,)
            now = self.device.clock.now()
            self.ledger = ledger.admitted(
                self.ledger, seat.request, seat.slot, seat.positions, now, seat.found
            )
            beginning.append(self._beginning(seat.request))
        for some in itertools.batched(beginning, self.plan.admitted_at_once):
            self._begin(some)
        assert self.ledger.running or not self.ledger.waiting, "all wait although nothing runs"

    def _next_seat(self) -> Seat | None:
        if not self.ledger.waiting or self._sees_what_it_saw():
            return None
        self.ledger = ledger.with_new_pages(self.ledger)
        seat = choose_seat(self.plan, self.ledger)
        if seat is None:
            self.no_seat = self.ledger.waiting, self.ledger.book, self._tokens_read()
        return seat

    def _sees_what_it_saw(self) -> bool:
        if self.no_seat is None:
            return False
        waiting, book, read = self.no_seat
        same = waiting is self.ledger.waiting and book is self.ledger.book
        return same and read == self._tokens_read()

    def _tokens_read(self) -> int:
        return sum(request.prefilled for request in self.ledger.running.values())

    def _beginning(self, before: Request) -> Beginning:
        request = self.ledger.running[before.id]
        found = request.context[before.prefilled : request.prefilled]
        return Beginning(request, found, ledger.saved_row(self.ledger, request))

    def _begin(self, beginning: Sequence[Beginning]) -> None:
        """Gives requests their slots on the device. Drafters are told of the tokens that were found
        in the cache as if these had been read."""
        self.tried = tuple(one.request.id for one in beginning)
        self._admit_on_device(self.tried)
        for one in beginning:
            if one.saved_row is not None:
                row = self.plan.first_snapshot + one.saved_row
                self._copy_state(row, self._slot_of(one.request))
            if one.found:
                self._tell_drafters(one.request, one.found)

    def _admit_on_device(self, ids: Sequence[int]) -> None:
        """Launches one program for all of these requests, because a device runs few programs that
        are launched ahead."""
        requests = [self.ledger.running[id] for id in ids]
        pages = [self.ledger.book.held[id] for id in ids]
        plan = self.plan
        sizes = plan.admitted_at_once, plan.max_pages, plan.recalled_positions
        self.device.run(admit_step, admission_of(requests, pages, *sizes))

    # States of recurrent layers

    def _save_state(self, request: Request) -> None:
        """Saves the state of a request if it was read up to a place where states are saved."""
        self.ledger, row = ledger.saved(self.ledger, request)
        if row is not None:
            self._copy_state(self._slot_of(request), self.plan.first_snapshot + row)

    def _copy_state(self, source: int, target: int) -> None:
        rows = (self.device.integers((row,), (), 0) for row in (source, target))
        self.device.run(copy_step, *rows)

    @staticmethod
    def _slot_of(request: Request) -> int:
        assert request.slot is not None, "a running request has a slot"
        return request.slot

    # Reading prompts

    def _read_prompts(self) -> bool:
        """Launches programs that read prompts, if any are left to read. Returns whether it did."""
        all_read = not self.ledger.waiting and all(r.is_prefilled for r in self._candidates())
        return not all_read and self._launch_reading()

    def _launch_reading(self) -> bool:
        """Launches as many programs that read prompts as are allowed, or one decode step that also
        reads a prompt. Returns whether it launched any."""
        before, ready = len(self.ledger.launched), self._ready_to_decode()
        if not ready:
            self.ledger = ledger.nobody_decodes(self.ledger)
        allowance = allowance_of(self.plan, self.ledger, ready)
        self._admit_some()
        if self._read_beside(ready):
            return True
        while choice := self._choose_prefill(allowance):
            if not self._find_more(choice[1]):
                self._prefill(*choice)
            self._admit_some()
        return len(self.ledger.launched) > before

    def _choose_prefill(self, allowance: Allowance) -> tuple[Chunk, list[Request]] | None:
        return choose_prefill(self.plan.shapes, self.ledger, self._candidates(), allowance)

    def _find_more(self, chosen: Sequence[Request]) -> bool:
        """Looks once more in the prefix cache for requests whose first chunk is next, because
        others may have read their beginning since they were admitted. Returns whether that changes
        what one of them reads."""
        new = [request for request in chosen if request.prefilled == request.begins_at]
        return any([self._finds_more(request) for request in new])

    def _finds_more(self, request: Request) -> bool:
        self.ledger = ledger.with_new_pages(self.ledger)
        if found := ledger.found_since(self.ledger, request):
            self.tried = (request.id,)
            self.ledger = ledger.found_later(self.ledger, request, found)
            self._begin([self._beginning(request)])
        self.ledger = ledger.with_halts(self.ledger, self.ledger.running[request.id])
        return self.ledger.running[request.id] is not request

    def _prefill(self, chunk: Chunk, chosen: Sequence[Request]) -> None:
        """Launches the program that reads the next chunk of these prompts."""
        self.tried = tuple(request.id for request in chosen)
        draws = self.plan.exact or any(request.draws for request in chosen)
        scored = any(request.scores_next_chunk for request in chosen)
        width = chunk.width
        inputs = prompt_chunk(chosen, chunk.batch, width, self.plan.num_slots, scored)
        self._note_read(self.device.run(prefill_step, inputs, draws=draws), chunk, chosen)

    def _note_read(
        self, result: StepResult, chunk: Chunk, chosen: Sequence[Request], size: Size | None = None
    ) -> None:
        """Records that a program was launched which reads the next chunk of these prompts. `size`
        is that of its decode step, if it also has one."""
        after = [replace(r, prefilled=min(r.prefilled + chunk.width, r.next_halt)) for r in chosen]
        for before, request in zip(chosen, after):
            self._tell_drafters(request, _newly_read(before, request))
        silent = frozenset(r.id for r in after if r.resumed or not r.is_prefilled)
        ids = tuple(request.id for request in after)
        self._note_launched(Launched(ids, result, silent, chunk.tokens, size), after)
        for request in after:
            self._save_state(request)

    def _read_beside(self, ready: list[Request]) -> bool:
        """Launches a decode step that also reads a chunk of a prompt, if a prompt should be read
        that way and the program is ready. Returns whether it did."""
        chosen = self._choose_beside(ready)
        while chosen is not None and self._find_more([chosen]):
            chosen = self._choose_beside(ready)
        if chosen is None:
            return False
        choice = choose_mixed(self.plan, self.drafters, ready, chosen)
        if not is_ready(self.device, choice.programs):
            return False
        self._decode_and_read(choice, ready, chosen)
        return True

    def _decode_and_read(self, choice: DecodeChoice, ready: list[Request], chosen: Request) -> None:
        """Launches the step. The prompt is recorded first: recording a decode step resets the count
        of tokens read since, to which this chunk must not be added."""
        self.tried = tuple(request.id for request in (*ready, chosen))
        inputs = decode_inputs(self.device, self.plan, choice, ready)
        tokens = choice.programs.beside
        chunk = prompt_chunk([chosen], 1, tokens, self.plan.num_slots)
        decoded, first = launch_mixed(self.device, choice.programs, inputs, chunk)
        self._note_read(first, Chunk(1, tokens, (0,)), [chosen], choice.size)
        self._note_launched(Launched(self.tried[:-1], decoded, same_program=True))

    def _choose_beside(self, ready: Sequence[Request]) -> Request | None:
        """The request whose prompt to read. None while drafts do not pay, because a step that also
        reads a prompt always makes and verifies some."""
        if not self.drafters.pay(self.plan, len(ready)):
            return None
        return choose_beside(self.plan, self.ledger, self._candidates(), ready)

    def _tell_drafters(
        self, request: Request, tokens: Sequence[int], num_drafts: int = 0, accepted: int = 0
    ) -> None:
        if request.params.speculate:
            self.drafters.commit(request.id, tokens, num_drafts, accepted)

    # Decoding

    def _decode(self, requests: list[Request]) -> None:
        """Launches a decode step of these requests."""
        self.tried = tuple(request.id for request in requests)
        choice = choose_decode(self.plan, self.drafters, requests)
        inputs = decode_inputs(self.device, self.plan, choice, requests)
        result = launch_decode(self.device, choice.programs, inputs)
        self._note_launched(Launched(self.tried, result, size=choice.size))

    def _ready_to_decode(self) -> list[Request]:
        """Requests whose prompts have been read and that may have budget left."""
        steps = self.ledger.launched
        unread = collections.Counter(id for s in steps for id in s.requests if id not in s.silent)
        return [
            request
            for request in self._candidates()
            if request.is_prefilled
            and request.num_tokens + unread[request.id] < request.params.max_tokens
        ]

    def _candidates(self) -> list[Request]:
        """The running requests, or only the first suspect if it is among them."""
        running, suspects = self.ledger.running, self.ledger.suspects
        alone = [running[id] for id in [*suspects][:1] if id in running]
        return alone or [*running.values()]

    def _note_launched(self, step: Launched, prompts: Sequence[Request] = ()) -> None:
        begin_copies(jax.tree.leaves(step.result))
        self.ledger = ledger.launched(self.ledger, step, prompts)

    # Reading results

    def read_results(self, but: int = 0) -> None:
        """Reads the results of every launched step, except the newest `but` steps."""
        while len(self.ledger.launched) > but:
            self._read(self.ledger.launched[0])

    def _read(self, step: Launched) -> None:
        """Adds the tokens of the oldest launched step to its requests."""
        self.tried = step.requests
        asked, result = self.device.clock.now(), self.device.fetched(step.result)
        before, now = self.ledger, self.device.clock.now()
        if self.drafters.adaptive is not None:
            note_time(self.drafters.adaptive, before.launched, asked, now)
        if result.prompt is not None:
            before = with_scores(before, step.requests, result.prompt)
        progress = list(progress_in(before, step, result, now, self.tokenizer))
        for one in progress:
            tokens = one.increment.gained.token_ids
            self._tell_drafters(one.request, tokens, one.num_drafts, one.accepted)
        self.ledger = ledger.read(before, [(one.request, one.increment) for one in progress])
        if any(one.increment.ended for one in progress):
            self.drafters.release_all_but(self.ledger.running)

    # Beginning anew

    def _begin_anew(self) -> None:
        """Makes new pools. Every running request will be prefilled again from its tokens."""
        self.ledger = ledger.begun_anew(self.ledger)
        self.drafters.release_all_but(())
        self.device.discard_state()  # first, since memory may not hold old and new pools together
        self.device.state = self.new_state()
        for ids in itertools.batched(self.ledger.running, self.plan.admitted_at_once):
            self._admit_on_device(ids)


def _newly_read(before: Request, after: Request) -> tuple[int, ...]:
    """The tokens of a chunk and, if it is the last, the token after it if that is known already."""
    tokens, known = after.context[before.prefilled : after.prefilled], after.known_next
    return tokens if known is None or not after.is_prefilled else (*tokens, known)
