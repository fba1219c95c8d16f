"""Which request holds which pages: an immutable book, and its two transitions.

A step computes a whole new book, which then replaces the old one in a single assignment. A step
that fails half-way therefore leaves the old book unchanged.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType


@dataclasses.dataclass(frozen=True)
class PageBook:
    """The pages that are free, and those that each request holds. Page 0, the trash page, is
    neither."""

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
    """The book of caches with `num_pages` pages, including the trash page."""
    return PageBook(page_size, free=tuple(range(1, num_pages)))


def can_admit(book: PageBook, positions: int) -> bool:
    return book.pages_for(positions) <= len(book.free)


def admit(book: PageBook, request: int, positions: int) -> PageBook:
    """Gives a request all the pages that it can ever need."""
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
