"""What must be so of a page book at any time."""

import collections

import numpy as np

from jaxspec.engine.schedule.pages import PageBook


def check_book(book: PageBook, num_pages: int) -> None:
    """Every page but the trash page is free or held; holders are counted right; the index is the
    same from both of its sides."""
    counts = collections.Counter(page for pages in book.held.values() for page in pages)
    assert dict(book.holders) == counts
    assert sorted([*counts, *book.free]) == list(range(1, num_pages))
    assert book.total == num_pages - 1
    assert all(len(set(pages)) == len(pages) for pages in book.held.values())
    index = book.index
    assert {entry.page: key for key, entry in index.entries.items()} == dict(index.keys)
    serials = [entry.serial for entry in index.entries.values()]
    assert len(set(serials)) == len(serials) and max(serials, default=0) < index.next_serial
    key_size = book.page_size + index.looks_ahead
    assert all(len(tokens) == key_size for _, tokens in index.entries)
    assert set(index.chains) <= set(book.held)
    without_entry = [page not in index.keys for page in book.free]
    assert without_entry == sorted(without_entry, reverse=True) or not any(without_entry), (
        "a page without an entry is handed out after one with an entry"
    )


def check_contents(book: PageBook, *pools: np.ndarray) -> None:
    """Pages with an entry hold its tokens, in the target's pool and the drafter's."""
    for (_, tokens), entry in book.index.entries.items():
        for pool in pools:
            assert tuple(pool[entry.page].tolist()) == tokens, f"page {entry.page}"


def findable_pages(book: PageBook) -> set[int]:
    """Pages that a request which is still to come may read."""
    return set(book.index.keys)
