"""Which request holds which pages: an immutable book, and its two transitions.

The book that a step leads to is computed whole and then takes the old one's place in a single
assignment, so a step that fails half-way leaves the old book as it was.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType


@dataclasses.dataclass(frozen=True)
class PageBook:
    """Every page is free or held by one request; page 0, the trash page, is in no book."""

    page_size: int
    free: tuple[int, ...]
    held: Mapping[int, tuple[int, ...]] = MappingProxyType({})
    """Pages by request id, in the order of the positions that they hold."""

    @property
    def total(self) -> int:
        return len(self.free) + sum(map(len, self.held.values()))

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
    return _with(book, book.free[count:], {**book.held, request: book.free[:count]})


def release(book: PageBook, request: int) -> PageBook:
    """Takes a request's pages back."""
    held = dict(book.held)
    pages = held.pop(request)
    return _with(book, (*book.free, *pages), held)


def _with(book: PageBook, free: tuple[int, ...], held: Mapping[int, tuple[int, ...]]) -> PageBook:
    return dataclasses.replace(book, free=free, held=MappingProxyType(dict(held)))
