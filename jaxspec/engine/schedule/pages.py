"""Which request holds which pages: an immutable book, and its three transitions.

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
    positions: int = 0
    """Committed positions."""


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

    def pages_for(self, positions: int) -> int:
        return -(-positions // self.page_size)


def new_book(num_pages: int, page_size: int) -> PageBook:
    """A book over caches of `num_pages`, the trash page among them."""
    return PageBook(page_size, free=tuple(range(1, num_pages)))


def can_admit(book: PageBook, positions: int) -> bool:
    return book.pages_for(positions) <= len(book.free)


def admit(book: PageBook, request: int, positions: int) -> PageBook:
    """Hands a request all the pages that it can ever need."""
    count = book.pages_for(positions)
    assert request not in book.held, f"request {request} holds pages already"
    assert can_admit(book, positions), f"{count} pages wanted, {len(book.free)} free"
    return _with(book, book.free[count:], {**book.held, request: Holding(book.free[:count])})


def commit(book: PageBook, positions: Mapping[int, int]) -> PageBook:
    """Records how many positions each of these requests has committed by now."""
    held = dict(book.held)
    for request, count in positions.items():
        pages, before = held[request].pages, held[request].positions
        assert before <= count <= len(pages) * book.page_size, "positions beyond the pages"
        held[request] = Holding(pages, count)
    return _with(book, book.free, held)


def release(book: PageBook, request: int) -> PageBook:
    """Takes a request's pages back."""
    held = dict(book.held)
    holding = held.pop(request)
    return _with(book, (*book.free, *holding.pages), held)


def _with(book: PageBook, free: tuple[int, ...], held: Mapping[int, Holding]) -> PageBook:
    return dataclasses.replace(book, free=free, held=MappingProxyType(dict(held)))
