"""Checks what must hold for a book of pages at any time."""

import collections

import numpy as np

from jaxspec.engine.schedule.pages import PageBook


def check_book(book: PageBook, num_pages: int) -> None:
    """Checks that every page but the trash page is free or held, that holders are counted right,
    and that both directions of the index agree."""
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

    if index.states is not None:
        check_saved(book)


def check_saved(book: PageBook) -> None:
    """Checks that every row is free, or holds the state of one text that is in the index or that
    the request reading it will put there."""
    states = book.index.states
    rows = [one.row for one in states.of_texts.values()]
    assert sorted([*rows, *states.free]) == list(range(states.total))
    for key, one in states.of_texts.items():
        assert key in book.index.entries or one.by in book.held, "nobody can find this state"


def whole_text(book: PageBook, key) -> tuple[int, ...] | None:
    """All tokens up to the end of a page; None if an entry before it is gone."""
    by_serial = {entry.serial: key for key, entry in book.index.entries.items()}
    parent, tokens = key
    if parent is None or isinstance(parent, str):
        return tokens[: book.page_size]
    before = whole_text(book, by_serial[parent]) if parent in by_serial else None
    return None if before is None else (*before, *tokens[: book.page_size])


def check_states(book: PageBook, rows: list[tuple[int, ...]], first: int) -> int:
    """Checks that the rows from `first` on hold the states of the texts that the book says. Returns
    how many of these texts were compared as a whole."""
    whole = 0
    for key, one in book.index.states.of_texts.items():
        state, tokens = rows[first + one.row], whole_text(book, key)
        if tokens is not None:
            whole += 1
            assert state == tokens, f"row {one.row} holds another state"
        assert len(state) % book.page_size == 0
        assert state[-book.page_size :] == key[1][: book.page_size]
    return whole


def check_contents(book: PageBook, *pools: np.ndarray) -> None:
    """Checks that a page with an entry holds its tokens, in the target's pool and the drafter's."""
    for (_, tokens), entry in book.index.entries.items():
        for pool in pools:
            assert tuple(pool[entry.page].tolist()) == tokens, f"page {entry.page}"


def findable_pages(book: PageBook) -> set[int]:
    """The pages that a future request may read."""
    return set(book.index.keys)
