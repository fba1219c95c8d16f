"""Which requests hold which pages: an immutable book, and its transitions.

A step computes a whole new book, which then replaces the old one in a single assignment. A step
that fails half-way therefore leaves the old book unchanged.

Requests whose texts begin alike hold the same pages (`page_index.py`). Shared pages are only read,
because they are full of committed tokens and requests write only to later pages.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from types import MappingProxyType

from jaxspec.engine.schedule import page_index
from jaxspec.engine.schedule.mappings import NONE, changed, removed
from jaxspec.engine.schedule.page_index import Chain, Entry, PageIndex, Salt
from jaxspec.engine.schedule.saved_states import SavedStates


@dataclasses.dataclass(frozen=True, eq=False)
class PageBook:
    """The pages that are free, those that each request holds, and the index of their texts. Page 0,
    the trash page, is in none of them."""

    page_size: int
    free: MappingProxyType[int, None]
    """The pages that nobody holds, in the order in which they are handed out: first those without
    an entry in the index, then the least recently used. It is a mapping, because pages are also
    taken out of its middle."""
    index: PageIndex
    """Finds held and free pages by their text. A free page has its entry until it is handed out."""
    held: MappingProxyType[int, tuple[int, ...]] = NONE
    """Pages by request id, in the order of the positions that they hold."""
    holders: MappingProxyType[int, int] = NONE
    """How many requests hold each page; free pages are not in it."""

    @property
    def total(self) -> int:
        return len(self.free) + len(self.holders)

    def pages_for(self, positions: int) -> int:
        return -(-positions // self.page_size)


def new_book(
    num_pages: int, page_size: int, looks_ahead: int = 0, states: SavedStates | None = None
) -> PageBook:
    """The book for caches of `num_pages` pages, including the trash page. The contents of a page
    depend on `looks_ahead` tokens after it. `states` is the book of recurrent layers' states."""
    free = MappingProxyType(dict.fromkeys(range(1, num_pages)))
    index = PageIndex(page_size, looks_ahead=looks_ahead, states=states)
    return PageBook(page_size, free, index)


def can_admit(book: PageBook, positions: int, found: Sequence[Entry] = ()) -> bool:
    """Whether there are pages for so many positions. The `found` entries have the first of them."""
    free = len(book.free) - sum(entry.page in book.free for entry in found)
    return book.pages_for(positions) - len(found) <= free


def admit(book: PageBook, request: int, positions: int, found: Sequence[Entry] = ()) -> PageBook:
    """Gives a request all the pages that it can ever need. The first of them are those of the
    entries that were found in the index."""
    count = book.pages_for(positions)
    assert request not in book.held, f"request {request} holds pages already"
    assert can_admit(book, positions, found), f"{count} pages wanted, {len(book.free)} free"
    shared = tuple(entry.page for entry in found)
    free = removed(book.free, shared)
    fresh = tuple(islice(free, count - len(shared)))
    pages = (*shared, *fresh)
    return PageBook(
        page_size=book.page_size,
        free=removed(free, fresh),
        index=page_index.without_pages(book.index, fresh),
        held=changed(book.held, {request: pages}),
        holders=changed(book.holders, {page: book.holders.get(page, 0) + 1 for page in pages}),
    )


def findable(book: PageBook, request: int, salt: Salt, found: Sequence[Entry] = ()) -> PageBook:
    """Lets pages of a request that was just admitted get entries in the index, after those that
    were found for it."""
    index = page_index.with_request(book.index, request, Chain(salt), found)
    return dataclasses.replace(book, index=index)


def take_found(book: PageBook, request: int, found: Sequence[Entry]) -> PageBook:
    """Gives a request that has read nothing yet the pages of these entries, which continue its
    text, and takes back its own pages in their places."""
    chain, before = book.index.chains[request], book.held[request]
    begin, end = chain.pages, chain.pages + len(found)
    shared = tuple(entry.page for entry in found)
    taken = dataclasses.replace(
        book,
        free=removed(book.free, shared),
        index=page_index.with_request(book.index, request, chain, found),
        held=changed(book.held, {request: (*before[:begin], *shared, *before[end:])}),
        holders=changed(book.holders, {page: book.holders.get(page, 0) + 1 for page in shared}),
    )
    return _given_back(taken, before[begin:end])


def fill(book: PageBook, texts: Iterable[tuple[int, tuple[int, ...]]]) -> PageBook:
    """Lets the whole pages of these requests' committed tokens be found from now on."""
    with_pages = [(request, book.held[request], tokens) for request, tokens in texts]
    return dataclasses.replace(book, index=page_index.filled(book.index, with_pages))


def saved_row(book: PageBook, request: int, length: int) -> int | None:
    """The row with the state after the first `length` tokens of a request, which were found in the
    index; None if no state is needed."""
    states, whole = book.index.states, length // book.page_size
    if states is None or not whole:
        return None
    return states.of_texts[book.index.keys[book.held[request][whole - 1]]].row


def save(
    book: PageBook, request: int, tokens: tuple[int, ...], length: int
) -> tuple[PageBook, int | None]:
    """Gives a row to the state after the first `length` tokens of a request, which were just read.
    Returns None in place of the row if another request has saved that state."""
    whole_before = length - book.page_size + book.index.looks_ahead
    book = fill(book, [(request, tokens[:whole_before])])
    assert book.index.chains[request].pages == length // book.page_size - 1
    index, row = page_index.with_state(book.index, request, tokens)
    return dataclasses.replace(book, index=index), row


def release(book: PageBook, request: int, forget: bool = False) -> PageBook:
    """Takes a request's pages back. Among those with entries, the last is handed out first, so that
    the beginnings of texts stay longest. With `forget`, all of them lose their entries."""
    pages, index = book.held[request], page_index.without_request(book.index, request, forget)
    if forget:
        index = page_index.without_pages(index, pages)
    rest = dataclasses.replace(book, index=index, held=removed(book.held, [request]))
    return _given_back(rest, pages)


def forgotten(book: PageBook, salts: Mapping[int, Salt] = NONE) -> PageBook:
    """The book with an empty index. Of the running requests, only those in `salts` can get entries
    for their pages from now on."""
    return dataclasses.replace(book, index=page_index.emptied(book.index, salts))


def _given_back(book: PageBook, pages: Sequence[int]) -> PageBook:
    """The book after one request has stopped holding these pages."""
    holders = book.holders.copy()
    for page in pages:
        holders[page] -= 1
    unheld = [page for page in reversed(pages) if not holders[page]]
    for page in unheld:
        del holders[page]
    unknown = dict.fromkeys(page for page in unheld if page not in book.index.keys)
    known = dict.fromkeys(page for page in unheld if page in book.index.keys)
    free = unknown | book.free.copy() | known
    return dataclasses.replace(book, free=MappingProxyType(free), holders=MappingProxyType(holders))
