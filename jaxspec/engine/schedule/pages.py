"""Who holds which pages: an immutable book, and its three transitions.

The book that a step leads to is computed whole and then takes the old one's place in a single
assignment, so a step that fails half-way leaves the old book as it was.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType


@dataclasses.dataclass(frozen=True)
class Holding:
    """The pages of one live request."""

    pages: tuple[int, ...]
    """In the order of the positions they hold."""
    rows: int = 0
    """Committed rows."""


@dataclasses.dataclass(frozen=True)
class PageBook:
    """Every page is free or held by one request; page 0, the trash page, is in no book."""

    page_size: int
    free: tuple[int, ...]
    held: Mapping[int, Holding] = MappingProxyType({})
    """By request id."""

    @property
    def total(self) -> int:
        return len(self.free) + sum(len(holding.pages) for holding in self.held.values())

    def pages_for(self, rows: int) -> int:
        return -(-rows // self.page_size)


def new_book(num_pages: int, page_size: int) -> PageBook:
    """A book over a pool of `num_pages`, the trash page among them."""
    return PageBook(page_size, free=tuple(range(1, num_pages)))


def can_admit(book: PageBook, rows: int) -> bool:
    return book.pages_for(rows) <= len(book.free)


def admit(book: PageBook, request: int, rows: int) -> PageBook:
    """Hands a request all the pages that its rows can ever need."""
    assert request not in book.held, f"request {request} holds pages already"
    assert can_admit(book, rows), f"{book.pages_for(rows)} pages wanted, {len(book.free)} free"
    count = book.pages_for(rows)
    return _with(book, book.free[count:], {**book.held, request: Holding(book.free[:count])})


def commit(book: PageBook, rows: Mapping[int, int]) -> PageBook:
    """Notes how many rows each of these requests has committed by now."""
    held = dict(book.held)
    for request, count in rows.items():
        pages = held[request].pages
        assert held[request].rows <= count <= len(pages) * book.page_size, "rows beyond the pages"
        held[request] = Holding(pages, count)
    return _with(book, book.free, held)


def release(book: PageBook, request: int) -> PageBook:
    """Takes a request's pages back."""
    held = dict(book.held)
    holding = held.pop(request)
    return _with(book, (*book.free, *holding.pages), held)


def _with(book: PageBook, free: tuple[int, ...], held: Mapping[int, Holding]) -> PageBook:
    return dataclasses.replace(book, free=free, held=MappingProxyType(dict(held)))
