"""The page book alone: any walk over its transitions keeps every page in exactly one place."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxspec.engine.schedule import pages

PAGES, PAGE_SIZE = 17, 4


class Book(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.book = pages.new_book(PAGES, PAGE_SIZE)
        self.positions: dict[int, int] = {}
        self.next_id = 0

    @rule(positions=st.integers(1, 40))
    def admit(self, positions):
        before = self.book
        if not pages.can_admit(before, positions):
            assert -(-positions // PAGE_SIZE) > len(before.free)
            with pytest.raises(AssertionError, match="pages wanted"):
                pages.admit(before, self.next_id, positions)
            return
        self.book = pages.admit(before, self.next_id, positions)
        held = self.book.held[self.next_id].pages
        assert len(held) == -(-positions // PAGE_SIZE) and set(held) <= set(before.free)
        assert self.next_id not in before.held, "the old book changed"
        self.positions[self.next_id] = positions
        self.next_id += 1

    @precondition(lambda self: self.positions)
    @rule(data=st.data())
    def commit(self, data):
        request = data.draw(st.sampled_from(sorted(self.positions)))
        committed = self.book.held[request].positions
        positions = data.draw(st.integers(committed, self.positions[request]))
        before = self.book
        self.book = pages.commit(before, {request: positions})
        assert self.book.held[request].positions == positions
        assert self.book.held[request].pages == before.held[request].pages

    @precondition(lambda self: self.positions)
    @rule(data=st.data())
    def commit_beyond_the_pages(self, data):
        request = data.draw(st.sampled_from(sorted(self.positions)))
        before = self.book
        beyond = len(before.held[request].pages) * PAGE_SIZE + 1
        with pytest.raises(AssertionError, match="positions beyond the pages"):
            pages.commit(before, {request: beyond})
        assert self.book == before

    @precondition(lambda self: self.positions)
    @rule(data=st.data())
    def release(self, data):
        request = data.draw(st.sampled_from(sorted(self.positions)))
        held = self.book.held[request].pages
        self.book = pages.release(self.book, request)
        assert set(held) <= set(self.book.free)
        del self.positions[request]

    @invariant()
    def every_page_is_in_one_place_and_the_trash_page_in_none(self):
        held = [page for holding in self.book.held.values() for page in holding.pages]
        assert sorted([*held, *self.book.free]) == list(range(1, PAGES))
        assert self.book.total == PAGES - 1

    @invariant()
    def holders_are_the_live_requests(self):
        assert set(self.book.held) == set(self.positions)


Book.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestBook = Book.TestCase
