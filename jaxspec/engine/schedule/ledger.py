"""The host's whole record of its requests: an immutable ledger, and its transitions.

A transition is a pure function that returns a new ledger. The loop stores it in a single
assignment, so whatever is raised at whatever line leaves either the old ledger or the new one.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from jaxspec.engine.requests.advance import end
from jaxspec.engine.requests.output import output_of
from jaxspec.engine.requests.request import Increment, Request
from jaxspec.engine.schedule import pages
from jaxspec.engine.schedule.pages import PageBook
from jaxspec.engine.stats.acceptance import PooledStats, pool
from jaxspec.engine.stats.latencies import Latencies, with_request
from jaxspec.engine.step.io import StepResult

NOBODY: Mapping[int, Request] = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Launched:
    """A step that was launched and whose result the host has not read yet."""

    requests: tuple[int, ...]
    """Ids of the requests in its batch, in order."""
    result: StepResult
    silent: frozenset[int] = frozenset()
    """Requests that get no token from the step: their prompt continues after this chunk, or the
    token after it was emitted before."""


@dataclasses.dataclass(frozen=True)
class Ledger:
    """Every live request, what it holds, and what its caller has not taken yet."""

    book: PageBook
    """Pages of the running requests."""
    num_drafts: int
    """Most drafts of a request in a step, which statistics have a place for each of."""
    synthetic: bool = False
    """Whether acceptance is drawn instead of found by comparing drafts."""
    waiting: tuple[Request, ...] = ()
    """Requests without a slot, in the order in which they came."""
    running: Mapping[int, Request] = NOBODY
    """Requests with a slot, by id, in the order in which they were admitted."""
    launched: tuple[Launched, ...] = ()
    """Steps whose results are still to be read, oldest first."""
    increments: tuple[Increment, ...] = ()
    """What steps added to requests and nobody has taken yet, oldest first."""
    suspects: Mapping[int, int] = MappingProxyType({})
    """Requests of a failed step, with the number of tokens they had. Each of them runs in steps of
    its own until it has more tokens, or until it fails again and thus caused the failure."""
    finished: PooledStats = PooledStats()
    """Statistics of the requests that have ended, except those that their caller dropped."""
    latencies: Latencies = Latencies()
    """Latencies of the same requests."""

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.running)


# A request comes and gets a slot


def submitted(ledger: Ledger, requests: Iterable[Request]) -> Ledger:
    """With new requests at the end of the queue."""
    return replace(ledger, waiting=(*ledger.waiting, *requests))


def admitted(ledger: Ledger, slot: int, positions: int, now: float) -> Ledger:
    """The first of the waiting requests has a slot and all pages that it can need."""
    request = replace(ledger.waiting[0], slot=slot, seated_at=now)
    return replace(
        ledger,
        book=pages.admit(ledger.book, request.id, positions),
        waiting=ledger.waiting[1:],
        running=_with(ledger.running, [request]),
    )


# Steps


def launched(ledger: Ledger, step: Launched, prompts: Sequence[Request] = ()) -> Ledger:
    """A step was launched, which reads more of some prompts."""
    running = _with(ledger.running, prompts) if prompts else ledger.running
    return replace(ledger, running=running, launched=(*ledger.launched, step))


def read(ledger: Ledger, progress: Sequence[tuple[Request, Increment]]) -> Ledger:
    """The oldest launched step was read, and these requests made progress in it."""
    return _progressed(replace(ledger, launched=ledger.launched[1:]), progress)


def failed(ledger: Ledger, tried: Collection[int], error: str) -> Ledger:
    """A step failed: nothing of it counts, nor of the steps that were launched before it and not
    read. `tried` are the requests in its batch, if it came to choosing them.

    The first failure makes suspects of its requests, which then run alone. The second ends the one
    that ran alone, so that every other step that fails ends a request.
    """
    ledger = replace(ledger, launched=())
    if ledger.suspects:
        return ended(ledger, {next(iter(ledger.suspects))}, "error", error)
    live = {r.id: r for r in (*ledger.running.values(), *ledger.waiting)}
    suspected = [id for id in tried if id in live] or [*ledger.running] or [*live][:1]
    return replace(ledger, suspects={id: len(live[id].token_ids) for id in suspected})


def begun_anew(ledger: Ledger) -> Ledger:
    """Nothing is on the device: every running request reads all of its tokens again."""
    unread = [
        replace(request, prefilled=0, resumed=len(request.token_ids))
        for request in ledger.running.values()
    ]
    return replace(ledger, running=_with(ledger.running, unread), launched=())


# A request ends


def ended(ledger: Ledger, ids: Collection[int], reason: str, error: str | None = None) -> Ledger:
    """These requests end for a reason that is not in their tokens."""
    live = (*ledger.waiting, *ledger.running.values())
    return _progressed(ledger, [end(r, reason, error) for r in live if r.id in ids])


def refused(ledger: Ledger, reasons: Sequence[tuple[Request, str]]) -> Ledger:
    """With requests that ended before they could wait."""
    return _progressed(ledger, [end(request, "error", reason) for request, reason in reasons])


def dropped(ledger: Ledger, ids: Collection[int]) -> Ledger:
    """Without these requests and without what they have not taken: nobody waits for them."""
    book = ledger.book
    for id in ids:
        book = pages.release(book, id) if id in ledger.running else book
    rest = replace(
        ledger,
        book=book,
        waiting=tuple(request for request in ledger.waiting if request.id not in ids),
        running=_without(ledger.running, ids),
        increments=tuple(i for i in ledger.increments if i.request not in ids),
    )
    return _without_cleared(rest)


def emptied(ledger: Ledger) -> Ledger:
    """Without any request. Statistics of those that have ended are kept."""
    live = {request.id for request in (*ledger.waiting, *ledger.running.values())}
    return replace(dropped(ledger, live), launched=(), increments=())


# Increments


def untaken(ledger: Ledger, of: Collection[int]) -> list[Increment]:
    """The increments of these requests."""
    return [increment for increment in ledger.increments if increment.request in of]


def taken(ledger: Ledger, increments: Sequence[Increment]) -> Ledger:
    """Without these increments: their caller has them."""
    gone = set(map(id, increments))
    return replace(ledger, increments=tuple(i for i in ledger.increments if id(i) not in gone))


def given_back(ledger: Ledger, increments: Sequence[Increment]) -> Ledger:
    """With these increments again, because their caller did not get them."""
    rest = taken(ledger, increments).increments
    return replace(ledger, increments=(*increments, *rest))


def _progressed(ledger: Ledger, progress: Sequence[tuple[Request, Increment]]) -> Ledger:
    """With new records of some requests, and their increments. A request that has ended leaves its
    slot, its pages and its place in the queue."""
    over = [request for request, _ in progress if request.finish_reason is not None]
    progressed = replace(
        ledger,
        running=_with(ledger.running, [r for r, _ in progress if r.finish_reason is None]),
        increments=(*ledger.increments, *(increment for _, increment in progress)),
    )
    if over:
        progressed = _without_ended(progressed, over)
    return _without_cleared(progressed) if ledger.suspects else progressed


def _without_ended(ledger: Ledger, over: Sequence[Request]) -> Ledger:
    ids, book, latencies = {request.id for request in over}, ledger.book, ledger.latencies
    stats = [output_of(request, ledger.num_drafts, ledger.synthetic).stats for request in over]
    for request in over:
        book = pages.release(book, request.id) if request.id in ledger.running else book
    for one in stats:
        latencies = with_request(latencies, one)
    return replace(
        ledger,
        book=book,
        waiting=tuple(request for request in ledger.waiting if request.id not in ids),
        running=_without(ledger.running, ids),
        finished=pool(stats, ledger.finished),
        latencies=latencies,
    )


def _without_cleared(ledger: Ledger) -> Ledger:
    """Those that have ended or have more tokens than when they failed are not suspects any more."""
    live = {r.id: len(r.token_ids) for r in (*ledger.running.values(), *ledger.waiting)}
    return replace(
        ledger, suspects={id: had for id, had in ledger.suspects.items() if live.get(id) == had}
    )


def _with(running: Mapping[int, Request], requests: Iterable[Request]) -> Mapping[int, Request]:
    return MappingProxyType({**running, **{request.id: request for request in requests}})


def _without(running: Mapping[int, Request], ids: Collection[int]) -> Mapping[int, Request]:
    return MappingProxyType({id: request for id, request in running.items() if id not in ids})
