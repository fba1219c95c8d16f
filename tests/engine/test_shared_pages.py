"""The page book with texts in its pages: no request ever finds a page that holds another text."""

import collections
import dataclasses
import random
from types import MappingProxyType

import jaxtyping
import pytest
from book_checks import check_book

from jaxspec.engine.schedule import page_index, pages
from jaxspec.engine.schedule.saved_states import new_states

SIZE = 4
SALTS = (None, None, "a", "b")


def text(*groups: int) -> tuple[int, ...]:
    """A whole page of each of these numbers."""
    return tuple(number for number in groups for _ in range(SIZE))


def found_in(book: pages.PageBook, salt: str | None, tokens: tuple[int, ...]):
    return page_index.find(book.index, page_index.Chain(salt), tokens)


def come(book: pages.PageBook, request: int, tokens: tuple[int, ...], salt=None, room: int = 4):
    """A request that has read all of its text, and how many pages of it were found."""
    found = found_in(book, salt, tokens)
    book = pages.admit(book, request, len(tokens) + room, found)
    book = pages.findable(book, request, salt, found)
    return pages.fill(book, [(request, tokens)]), len(found)


def test_a_hit_holds_the_same_pages_and_never_the_last_token():
    book, found = come(pages.new_book(17, SIZE), 1, text(1, 2, 3))
    assert found == 0
    for number, (tokens, expected) in enumerate(
        [(text(1, 2, 3), 2), ((*text(1, 2, 3), 9), 3), (text(1, 2, 9), 2), (text(1), 0), ((1,), 0)]
    ):
        after, found = come(book, 2, tokens)
        assert found == expected, number
        assert after.held[2][:found] == book.held[1][:found]
        assert not set(after.held[2][found:]) & set(book.held[1])
        check_book(after, 17)


def test_a_page_that_depends_on_the_token_after_it_is_found_only_before_that_token():
    tokens = (*text(1, 2), 9)
    book, _ = come(pages.new_book(17, SIZE, looks_ahead=1), 1, tokens)
    for after, expected in ((9, 2), (8, 1)):
        assert len(found_in(book, None, (*text(1, 2), after, 5))) == expected
    shorter, _ = come(pages.new_book(17, SIZE, looks_ahead=1), 1, text(1, 2))
    assert len(found_in(shorter, None, tokens)) == 1, "what follows its last page is not known"
    assert page_index.has_new(shorter.index, 1, 2 * SIZE + 1)
    assert not page_index.has_new(shorter.index, 1, 2 * SIZE)
    other, found = come(book, 2, (*text(1, 2), 8))
    assert found == 1 and other.held[2][1] != other.held[1][1]
    check_book(other, 17)


def test_salts_never_share_and_a_salt_is_no_serial_number():
    book, _ = come(pages.new_book(33, SIZE), 1, text(1, 2, 3), salt="1")
    for request, (salt, expected) in enumerate([("1", 2), (None, 0), ("2", 0), ("", 0)], 2):
        book, found = come(book, request, text(1, 2, 3), salt)
        assert found == expected, salt


def test_the_same_page_after_another_text_is_another_text():
    book, _ = come(pages.new_book(33, SIZE), 1, text(1, 2, 3, 4))
    assert found_in(book, None, text(9, 2, 3, 4)) == ()
    assert found_in(book, None, text(2, 3, 4)) == ()


def test_a_page_that_was_handed_out_again_has_no_old_successors():
    """Its new text has a serial number of its own, so nothing that came after the old text can
    come after the new one."""
    book, _ = come(pages.new_book(7, SIZE), 1, text(1, 2, 3))
    book = pages.release(book, 1)
    before = book.index.next_serial
    book, found = come(book, 2, text(8, 2, 3), room=12)
    assert found == 0 and book.index.next_serial > before
    assert len(book.held[2]) == 6, "all pages, those of the first text among them"
    assert found_in(book, None, (*text(1, 2, 3), 0)) == ()
    book = pages.release(book, 2)
    assert len(found_in(book, None, (*text(8, 2, 3), 0))) == 3


def test_pages_are_handed_out_unknown_first_then_least_recently_used_and_ends_before_beginnings():
    book, _ = come(pages.new_book(9, SIZE), 1, text(1, 2, 3), room=4)
    book, _ = come(book, 2, text(5, 6), room=4)
    first, second = book.held[1], book.held[2]
    book = pages.release(pages.release(book, 1), 2)
    unused = [page for page in range(1, 9) if page not in (*first, *second)]
    expected = [second[2], first[3], *unused, first[2], first[1], first[0], second[1], second[0]]
    assert [*book.free] == expected
    book, found = come(book, 3, text(1, 2, 9), room=0)  # uses the first text again
    held = book.held[3]
    assert found == 2 and held[:2] == first[:2] and len(held) == 3
    book = pages.release(book, 3)
    assert [*book.free][-5:] == [second[1], second[0], *reversed(held)], "the newest use is last"


def test_a_request_that_is_to_be_forgotten_takes_its_entries_with_it():
    book, _ = come(pages.new_book(17, SIZE), 1, text(1, 2))
    book = pages.release(book, 1, forget=True)
    assert found_in(book, None, (*text(1, 2), 0)) == ()
    check_book(book, 17)


def test_what_was_read_meanwhile_replaces_pages_that_are_still_empty():
    book = pages.new_book(17, SIZE)
    for request in (1, 2):
        book = pages.findable(pages.admit(book, request, 16), request, None)
    own = book.held[2]
    book = pages.fill(book, [(1, text(1, 2, 3))])
    found = found_in(book, None, text(1, 2, 3))
    book = pages.take_found(book, 2, found)
    assert book.held[2] == (*book.held[1][:2], *own[2:])
    assert set(own[:2]) <= set(book.free)
    check_book(book, 17)
    assert book.index.chains[2] == page_index.Chain(found[-1].serial, 2)


class Walk:
    """A random life of a book. Beside it stands what really was written to every page: for page i
    of a request the salt and all tokens up to the end of the page, as keys and values depend on
    all of them, and if they depend on the token after it (`ahead` 1), up to that."""

    def __init__(self, seed: int, num_pages: int, ahead: int = 0, snapshots: int = 0):
        self.random = random.Random(seed)
        self.num_pages = num_pages
        self.ahead = ahead
        states = new_states(snapshots, SIZE) if snapshots else None
        self.book = pages.new_book(num_pages, SIZE, ahead, states)
        self.rows: dict[int, tuple] = {}
        """Salt and tokens of the state that every row really holds."""
        self.whole: dict[int, int] = {}
        """How many pages of each request are whole."""
        self.written: dict[int, tuple] = {}
        self.texts: dict[int, tuple] = {}
        """Salt, tokens and how many of them were read, by request."""
        self.counts: collections.Counter[str] = collections.Counter()
        self.ids = iter(range(1, 10**9))

    def tokens(self) -> tuple[int, ...]:
        """Few different ones, so that many begin alike."""
        roll = self.random.randrange
        pieces = [roll(3) for _ in range(roll(1, 6))]
        return (*text(*pieces), *(roll(2) for _ in range(roll(SIZE))))

    def write(self, request: int, upto: int) -> None:
        salt, tokens, read = self.texts[request]
        before, self.whole[request] = self.whole[request], max(upto - self.ahead, 0) // SIZE
        for at in range(before, self.whole[request]):
            page = self.book.held[request][at]
            content = self.content(salt, tokens, at)
            if self.book.holders[page] > 1:
                before = self.written.get(page, content)  # none after a fault
                assert before == content, "a page that others read was overwritten"
            self.written[page] = content
        self.texts[request] = salt, tokens, upto

    def content(self, salt, tokens, at: int) -> tuple:
        return salt, tokens[: (at + 1) * SIZE + self.ahead]

    def check_found(self, salt, tokens, found, begin: int = 0) -> None:
        for at, entry in enumerate(found, begin):
            assert self.written[entry.page] == self.content(salt, tokens, at)
        self.counts["hits"] += len(found)

    def come(self) -> None:
        salt, tokens = self.random.choice(SALTS), self.tokens()
        positions = len(tokens) + self.random.randrange(1, 9)
        found = found_in(self.book, salt, tokens)
        self.check_found(salt, tokens, found)
        if not pages.can_admit(self.book, positions, found):
            self.counts["no room"] += 1
            return
        request, before = next(self.ids), self.book
        self.book = pages.admit(before, request, positions, found)
        fresh = self.book.held[request][len(found) :]
        assert set(fresh) <= set(before.free)
        self.counts["evicted"] += sum(page in before.index.keys for page in fresh)
        for page in fresh:
            self.written.pop(page, None)
        self.book = pages.findable(self.book, request, salt, found)
        self.texts[request] = salt, tokens, len(found) * SIZE
        self.whole[request] = len(found)
        self.check_state(request)

    def read(self) -> None:
        request = self.any()
        salt, tokens, read = self.texts[request]
        if read % SIZE == 0 and self.random.random() < 0.5:
            chain = self.book.index.chains.get(request)
            found = page_index.find(self.book.index, chain, tokens) if chain else ()
            if found and chain.pages * SIZE == read:
                self.check_found(salt, tokens, found, chain.pages)
                self.book = pages.take_found(self.book, request, found)
                self.texts[request] = salt, tokens, read + len(found) * SIZE
                self.whole[request] = chain.pages + len(found)
                self.counts["found later"] += 1
                self.check_state(request)
                return
        upto = min(read + self.random.randrange(1, 9), len(tokens))
        if self.book.index.states is not None and self.random.random() < 0.5:
            upto = max(read, upto // SIZE * SIZE)  # a halt
        self.write(request, upto)
        self.save(request)
        if page_index.has_new(self.book.index, request, self.texts[request][2]):
            self.book = pages.fill(self.book, [(request, tokens[: self.texts[request][2]])])

    def check_state(self, request: int) -> None:
        """A request that begins behind pages has a row with the state of exactly their text."""
        salt, tokens, length = self.texts[request]
        if self.book.index.states is not None and length:
            row = pages.saved_row(self.book, request, length)
            assert self.rows[row] == (salt, tokens[:length]), "the state of another text"

    def save(self, request: int) -> None:
        """The state is saved at some of the ends of pages."""
        salt, tokens, read = self.texts[request]
        is_end = read and read % SIZE == 0 and read < len(tokens)
        chain = self.book.index.chains.get(request)
        findable = chain is not None and chain.pages * SIZE < read
        states = self.book.index.states
        if states is None or not (is_end and findable):
            return
        self.book, row = pages.save(self.book, request, tokens, read)
        if row is None:
            self.counts["saved by another"] += 1
            return
        self.counts["overwritten"] += row not in states.free
        self.rows[row] = salt, tokens[:read]

    def go_on(self) -> None:
        """Emits tokens, which come into the index when the request ends."""
        request = self.any()
        salt, tokens, read = self.texts[request]
        room = len(self.book.held[request]) * SIZE
        if read == len(tokens) < room:
            longer = (*tokens, *(self.random.randrange(2) for _ in range(room - len(tokens))))
            self.texts[request] = salt, longer, read
            self.write(request, min(len(longer), read + self.random.randrange(1, 6)))
            self.texts[request] = salt, longer[: self.texts[request][2]], self.texts[request][2]

    def end(self) -> None:
        request = self.any()
        _, tokens, read = self.texts.pop(request)
        failed = self.random.random() < 0.1
        if not failed and page_index.has_new(self.book.index, request, read):
            self.book = pages.fill(self.book, [(request, tokens[:read])])
        self.book = pages.release(self.book, request, forget=failed)

    def lose_everything(self) -> None:
        """A fault: the pools are new, and whoever runs reads again."""
        self.written.clear()
        self.rows.clear()
        self.texts = {id: (salt, tokens, 0) for id, (salt, tokens, _) in self.texts.items()}
        self.whole = dict.fromkeys(self.texts, 0)
        salts = {request: salt for request, (salt, *_) in self.texts.items()}
        self.book = pages.forgotten(self.book, salts)

    def forget(self) -> None:
        self.book = pages.forgotten(self.book)

    def any(self) -> int:
        return self.random.choice([*self.texts])

    def step(self) -> None:
        actions = [self.come] + [self.read, self.read, self.go_on, self.end] * bool(self.texts)
        rare = self.random.random()
        if rare < 0.0005:
            self.lose_everything()
        elif rare < 0.001:
            self.forget()
        else:
            self.random.choice(actions)()

    def check(self) -> None:
        check_book(self.book, self.num_pages)
        assert set(self.book.held) == set(self.texts)
        for key, entry in self.book.index.entries.items():
            assert self.written[entry.page][1][-SIZE - self.ahead :] == key[1]
        if self.book.index.states is not None:
            for key, one in self.book.index.states.of_texts.items():
                assert self.rows[one.row][1][-SIZE:] == key[1][:SIZE]


@pytest.mark.parametrize("ahead", [0, 1])
def test_100_000_random_operations_never_mix_up_two_texts(ahead, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # it takes half of the time
    counts: collections.Counter[str] = collections.Counter()
    for seed, num_pages in enumerate((9, 17, 33, 65)):
        walk = Walk(seed, num_pages, ahead)
        for number in range(25_000):
            walk.step()
            if number % 100 == 0:
                walk.check()
        counts += walk.counts
    seldom = min(counts[what] for what in ("hits", "evicted", "found later", "no room"))
    assert seldom > (100, 50)[ahead], counts


@pytest.mark.parametrize("ahead", [0, 1])
def test_100_000_random_operations_never_mix_up_two_states(ahead, monkeypatch):
    """With few rows, so that most are overwritten; that none is lost is checked with the book."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    counts: collections.Counter[str] = collections.Counter()
    for seed, (num_pages, snapshots) in enumerate([(9, 1), (17, 2), (33, 4), (33, 40), (65, 9)]):
        walk = Walk(seed, num_pages, ahead, snapshots)
        for number in range(20_000):
            walk.step()
            if number % 50 == 0:
                walk.check()
        counts += walk.counts
    names = "hits", "evicted", "found later", "no room", "overwritten", "saved by another"
    seldom = {what: counts[what] for what in names}
    assert min(seldom.values()) > 20, seldom


@pytest.mark.parametrize("wrong", ["row", "boundary"])
def test_the_oracle_notices_states_of_other_texts(wrong, monkeypatch):
    """Its own test: a book that names another row, or says a state is of a longer text."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    if wrong == "row":
        right = pages.saved_row
        other = lambda *a: None if (row := right(*a)) is None else (row + 1) % 9
        monkeypatch.setattr(pages, "saved_row", other)
    else:
        right_save = pages.save
        later = lambda book, request, tokens, length: right_save(
            book, request, tokens, min(length + SIZE, len(tokens) // SIZE * SIZE)
        )
        monkeypatch.setattr(pages, "save", later)
    walk = Walk(0, 33, snapshots=9)
    with pytest.raises((AssertionError, KeyError)):
        for _ in range(5000):
            walk.step()


def test_the_oracle_notices_a_key_without_what_came_before(monkeypatch):
    """Its own test: an index whose keys are only a page's own tokens is found out."""

    class Blind(dict):
        """Looks keys up without their first part."""

        def get(self, key, default=None):
            return next((e for (_, tokens), e in self.items() if tokens == key[1]), default)

    find = page_index.find

    def blind(index, chain, tokens):
        entries = MappingProxyType(Blind(index.entries))
        return find(dataclasses.replace(index, entries=entries), chain, tokens)

    monkeypatch.setattr(page_index, "find", blind)
    walk = Walk(0, 17)
    try:
        for _ in range(2000):
            walk.step()
    except AssertionError:
        return
    raise AssertionError("nobody noticed")
