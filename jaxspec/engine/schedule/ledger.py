"""The transitions of the ledger, which is the host's whole record of its requests.

A transition is a pure function that returns a new ledger. The loop stores it in a single
assignment, so whatever is raised at whatever line leaves either the old ledger or the new one.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from jaxspec.engine.requests.advance import end
from jaxspec.engine.requests.output import output_of
from jaxspec.engine.requests.request import Increment, Request
from jaxspec.engine.schedule import page_index, pages
from jaxspec.engine.schedule.page_index import Chain, Entry
from jaxspec.engine.schedule.pages import PageBook
from jaxspec.engine.schedule.record import Launched, Ledger
from jaxspec.engine.stats.acceptance import pool
from jaxspec.engine.stats.latencies import with_request

# A request comes and gets a slot


def submitted(ledger: Ledger, requests: Iterable[Request]) -> Ledger:
    """The ledger with new requests at the end of the queue."""
    return replace(ledger, waiting=(*ledger.waiting, *requests))


def admitted(
    ledger: Ledger,
    before: Request,
    slot: int,
    positions: int,
    now: float,
    found: Sequence[Entry] = (),
) -> Ledger:
    """The ledger after a waiting request got a slot and all pages that it can need. The pages in
    `found` hold the beginning of its text. Requests before it in the queue have been passed."""
    request = replace(before, slot=slot, seated_at=now)
    book = pages.admit(ledger.book, request.id, positions, found)
    place, taken = ledger.waiting.index(before), len(ledger.book.free) - len(book.free)
    passed = (replace(r, passed_pages=r.passed_pages + taken) for r in ledger.waiting[:place])
    if _can_be_found(ledger, request):
        book = pages.findable(book, request.id, request.cache_salt, found)
    queries = len(request.prompt) if _looks_up(ledger, request) else 0
    seated = replace(
        ledger,
        book=book,
        waiting=(*passed, *ledger.waiting[place + 1 :]),
        prefix_cache_queries=ledger.prefix_cache_queries + queries,
    )
    return _begun_behind(seated, request, found)


# Beginnings of texts that are in the cache


def with_new_pages(ledger: Ledger) -> Ledger:
    """The ledger with all pages in its index that prefill has filled by now."""
    index = ledger.book.index
    new = [r for r in ledger.running.values() if page_index.has_new(index, r.id, r.prefilled)]
    if not new:
        return ledger
    texts = [(request.id, request.context[: request.prefilled]) for request in new]
    return replace(ledger, book=pages.fill(ledger.book, texts))


def found_for(ledger: Ledger, request: Request) -> tuple[Entry, ...]:
    """The pages in the index that hold the beginning of a request's text."""
    if not _looks_up(ledger, request):
        return ()
    return page_index.find(ledger.book.index, Chain(request.cache_salt), request.context)


def found_tokens(ledger: Ledger, request: Request) -> int:
    """How many tokens of a request are found in the index."""
    return len(found_for(ledger, request)) * ledger.book.page_size


def found_since(ledger: Ledger, request: Request) -> tuple[Entry, ...]:
    """For a running request that has read nothing yet: further pages of its text that are in the
    index by now, because other requests have read them since it was admitted."""
    chain = ledger.book.index.chains.get(request.id)
    if chain is None or not _looks_up(ledger, request):
        return ()
    return page_index.find(ledger.book.index, chain, request.context)


def found_later(ledger: Ledger, request: Request, found: Sequence[Entry]) -> Ledger:
    """The ledger after a running request, which has read nothing yet, took these pages, too."""
    book = pages.take_found(ledger.book, request.id, found)
    return _begun_behind(replace(ledger, book=book), request, found)


def without_cached(ledger: Ledger) -> Ledger:
    """The ledger with an empty prefix cache."""
    return replace(ledger, book=pages.forgotten(ledger.book))


def _looks_up(ledger: Ledger, request: Request) -> bool:
    return ledger.prefix_caching and not request.reads_whole_prompt


def _can_be_found(ledger: Ledger, request: Request) -> bool:
    """Whether others may find what a request reads."""
    return ledger.prefix_caching and not (ledger.exact and request.reads_whole_prompt)


def _begun_behind(ledger: Ledger, request: Request, found: Sequence[Entry]) -> Ledger:
    tokens = request.prefilled + len(found) * ledger.book.page_size
    cached = max(request.cached_tokens, min(tokens, len(request.prompt)))
    begun = replace(request, prefilled=tokens, begins_at=tokens, cached_tokens=cached)
    begun = replace(begun, saves_at=_halts(ledger, begun))
    new_hits = cached - request.cached_tokens
    return replace(
        ledger,
        running=_with(ledger.running, [begun]),
        prefix_cache_hits=ledger.prefix_cache_hits + new_hits,
    )


# States of recurrent layers


def saved_row(ledger: Ledger, request: Request) -> int | None:
    """The row of the saved state from which a request begins that was just given the pages found
    for it; None if it needs none."""
    return pages.saved_row(ledger.book, request.id, request.prefilled)


def with_halts(ledger: Ledger, request: Request) -> Ledger:
    """The ledger with the halts of a running request, which has read nothing yet, chosen anew."""
    halts = _halts(ledger, request)
    if halts == request.saves_at:
        return ledger
    return replace(ledger, running=_with(ledger.running, [replace(request, saves_at=halts)]))


def saved(ledger: Ledger, request: Request) -> tuple[Ledger, int | None]:
    """The ledger after the state of a request got a row, and that row; None if the request is not
    at a halt, or if another one has saved that state."""
    if request.prefilled not in request.saves_at or request.id not in ledger.book.index.chains:
        return ledger, None
    book, row = pages.save(ledger.book, request.id, request.context, request.prefilled)
    return replace(ledger, book=book), row


def _halts(ledger: Ledger, request: Request) -> tuple[int, ...]:
    """The lengths at which the state of a request is worth saving: where the pages that are in the
    index already end, because other requests evidently begin alike, and shortly before the end of
    its prompt, because the prompt may come again."""
    index = ledger.book.index
    chain, states = index.chains.get(request.id), index.states
    if states is None or chain is None or request.reads_whole_prompt:
        return ()
    known = chain.pages + len(page_index.known_pages(index, chain, request.context))
    ends = [known * index.page_size, len(request.prompt) - 1]
    if _is_being_read(ledger, request, (known + 1) * index.page_size):
        ends = ends[1:]  # the known pages end only because another request is still being read
    return tuple(sorted({at for at in map(states.last_boundary, ends) if at > request.prefilled}))


def _is_being_read(ledger: Ledger, request: Request, length: int) -> bool:
    """Whether another request that is still being read begins with the same `length` tokens."""
    text = request.context[:length]
    return any(
        other.context[:length] == text and other.cache_salt == request.cache_salt
        for other in ledger.running.values()
        if other.id != request.id and not other.is_prefilled
    )


# Steps


def launched(ledger: Ledger, step: Launched, prompts: Sequence[Request] = ()) -> Ledger:
    """The ledger after a decode step was launched, or one that reads a chunk of these `prompts`."""
    steps = (*ledger.launched, step)
    if not prompts:
        return replace(ledger, launched=steps, read_since_decode=0, read_for=frozenset())
    return replace(
        ledger,
        running=_with(ledger.running, prompts),
        launched=steps,
        read_since_decode=ledger.read_since_decode + step.prompt_tokens,
        read_for=ledger.read_for.union(step.requests),
        read_last=step.requests,
    )


def nobody_decodes(ledger: Ledger) -> Ledger:
    """The ledger when no request can decode: nobody waits for the next decode step, so what was
    read since the last one does not count."""
    return replace(ledger, read_since_decode=0, read_for=frozenset())


def read(ledger: Ledger, progress: Sequence[tuple[Request, Increment]]) -> Ledger:
    """The ledger after the result of the oldest launched step, this progress, was read."""
    return _progressed(replace(ledger, launched=ledger.launched[1:]), progress)


def failed(ledger: Ledger, tried: Collection[int], error: str) -> Ledger:
    """The ledger after a step failed. Nothing of it counts, and nothing of earlier steps whose
    results were not read. `tried` are the requests in its batch, if these had been chosen.

    After a first failure the step's requests are suspects, which run one at a time. A second
    failure ends the request that ran alone, so that every second failed step ends a request.
    """
    ledger = replace(ledger, launched=())
    if ledger.suspects:
        return ended(ledger, {next(iter(ledger.suspects))}, "error", error)
    live = {r.id: r for r in (*ledger.running.values(), *ledger.waiting)}
    suspected = [id for id in tried if id in live] or [*ledger.running] or [*live][:1]
    return replace(ledger, suspects={id: live[id].num_tokens for id in suspected})


def all_failed(ledger: Ledger, error: str) -> Ledger:
    """The ledger after every request ended with this error, because nothing can run any more."""
    live = {*ledger.running, *(request.id for request in ledger.waiting)}
    return ended(replace(ledger, launched=()), live, "error", error)


def begun_anew(ledger: Ledger) -> Ledger:
    """The ledger after the device lost its state: every running request reads its tokens again."""
    unread = [
        replace(
            request,
            prefilled=0,
            begins_at=0,
            resumed=request.num_tokens,
            scored=request.scored if request.prompt_logprobs else (),
        )
        for request in ledger.running.values()
    ]
    salts = {r.id: r.cache_salt for r in unread if _can_be_found(ledger, r)}
    empty = replace(ledger, book=pages.forgotten(ledger.book, salts), launched=())
    unread = [replace(request, saves_at=_halts(empty, request)) for request in unread]
    return replace(empty, running=_with(ledger.running, unread))


# A request ends


def ended(ledger: Ledger, ids: Collection[int], reason: str, error: str | None = None) -> Ledger:
    """The ledger after these requests ended for a reason other than their tokens."""
    live = (*ledger.waiting, *ledger.running.values())
    return _progressed(ledger, [end(r, reason, error) for r in live if r.id in ids])


def refused(ledger: Ledger, reasons: Sequence[tuple[Request, str]]) -> Ledger:
    """The ledger with the refusals of requests that were never in the queue."""
    return _progressed(ledger, [end(request, "error", reason) for request, reason in reasons])


def dropped(ledger: Ledger, ids: Collection[int]) -> Ledger:
    """The ledger without these requests and their increments, because nobody waits for them."""
    book = ledger.book
    for id in ids:
        book = _given_back(ledger, book, ledger.running[id]) if id in ledger.running else book
    rest = replace(
        ledger,
        book=book,
        waiting=tuple(request for request in ledger.waiting if request.id not in ids),
        running=_without(ledger.running, ids),
        increments=tuple(i for i in ledger.increments if i.request not in ids),
    )
    return _without_cleared(rest)


def emptied(ledger: Ledger) -> Ledger:
    """The ledger without any request. Statistics of those that have ended are kept."""
    live = {request.id for request in (*ledger.waiting, *ledger.running.values())}
    return replace(dropped(ledger, live), launched=(), increments=())


# Increments


def taken(ledger: Ledger, of: Collection[int]) -> tuple[list[Increment], Ledger]:
    """The increments of these requests, and the ledger without them: their caller has them."""
    mine = [one for one in ledger.increments if one.request in of]
    if not mine:
        return mine, ledger
    rest = tuple(one for one in ledger.increments if one.request not in of)
    return mine, replace(ledger, increments=rest)


def given_back(ledger: Ledger, increments: Sequence[Increment]) -> Ledger:
    """The ledger with these increments again, because they did not reach their caller."""
    again = set(map(id, increments))
    rest = (one for one in ledger.increments if id(one) not in again)
    return replace(ledger, increments=(*increments, *rest))


def _progressed(ledger: Ledger, progress: Sequence[tuple[Request, Increment]]) -> Ledger:
    """The ledger with new records of some requests, and with their increments. A request that has
    ended leaves its slot, its pages and its place in the queue."""
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
        book = _given_back(ledger, book, request) if request.id in ledger.running else book
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


def _given_back(ledger: Ledger, book: PageBook, request: Request) -> PageBook:
    """The book after a running request has ended and given its pages back. Other requests can find
    these, unless it failed, because what the pages hold may be the reason."""
    failed = request.finish_reason == "error"
    positions = request.prefilled if ledger.exact else request.committed
    if not failed and page_index.has_new(book.index, request.id, positions):
        text = request.prompt + request.token_ids
        book = pages.fill(book, [(request.id, text[:positions])])
    return pages.release(book, request.id, forget=failed)


def _without_cleared(ledger: Ledger) -> Ledger:
    """The ledger whose suspects are only those that live and got no token since they failed."""
    live = {r.id: r.num_tokens for r in (*ledger.running.values(), *ledger.waiting)}
    return replace(
        ledger, suspects={id: had for id, had in ledger.suspects.items() if live.get(id) == had}
    )


def _with(running: Mapping[int, Request], requests: Iterable[Request]) -> Mapping[int, Request]:
    return MappingProxyType({**running, **{request.id: request for request in requests}})


def _without(running: Mapping[int, Request], ids: Collection[int]) -> Mapping[int, Request]:
    return MappingProxyType({id: request for id, request in running.items() if id not in ids})
