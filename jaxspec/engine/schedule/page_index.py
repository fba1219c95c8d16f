"""Which text lies in which page: an immutable index, and its transitions.

    text      t0 .. t63              t64 .. t127         t128 .. t191        t192 ..
    key       (salt, t0 .. t63)      (1, t64 .. t127)    (2, t128 .. t191)   the page is not full
    entry     page 7, serial 1       page 3, serial 2    page 9, serial 3

A key begins with the serial number of the entry before it, so it stands for the whole text up to
its end. Keys are compared as tokens, and no serial number is given twice. So no text is ever taken
for another, whatever a page held before.

If what a proposer keeps of a token depends on the token after it, the tokens of a key reach one
token further (`looks_ahead` 1), t0 .. t64 for the first page.

If a target has layers that keep one state per request, a page is found only up to the last one
whose text has a saved state (`saved_states.py`).
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from jaxspec.engine.schedule import saved_states
from jaxspec.engine.schedule.mappings import NONE, changed, removed
from jaxspec.engine.schedule.saved_states import SavedStates

Salt = str | None
"""Texts with different salts never share an entry."""
Key = tuple[int | Salt, tuple[int, ...]]
"""The serial number of the entry before it, or the salt if there is none; and the page's tokens,
with those after it on which its contents depend."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A page whose text can be found."""

    page: int
    serial: int
    """A number that no other entry ever has."""


@dataclasses.dataclass(frozen=True)
class Chain:
    """How far a request's text has been compared with the index."""

    parent: int | Salt
    """Serial number of the last entry of its text; its salt if there is none yet."""
    pages: int = 0
    """Number of its pages that were compared."""


@dataclasses.dataclass(frozen=True, eq=False)
class PageIndex:
    """The pages whose text can be found."""

    page_size: int
    entries: MappingProxyType[Key, Entry] = NONE
    keys: MappingProxyType[int, Key] = NONE
    """The key of every page that has an entry."""
    chains: MappingProxyType[int, Chain] = NONE
    """By request id, for the running requests whose pages may get entries."""
    next_serial: int = 1
    looks_ahead: int = 0
    """Number of tokens after a page on which its contents depend: 0 or 1."""
    states: SavedStates | None = None
    """The saved states of recurrent layers; None if the target has no such layers."""

    def key(self, parent: int | Salt, at: int, tokens: tuple[int, ...]) -> Key:
        """The key of page number `at` of a text. `parent` is the serial number of the entry before
        it, or the salt."""
        begin = at * self.page_size
        return parent, tokens[begin : begin + self.page_size + self.looks_ahead]

    def whole_pages(self, positions: int) -> int:
        """How many pages are complete once so many positions are committed."""
        return max(positions - self.looks_ahead, 0) // self.page_size


def find(index: PageIndex, chain: Chain, tokens: tuple[int, ...]) -> tuple[Entry, ...]:
    """The known entries, from the end of the chain on, after which a request with this text can
    begin. If layers keep one state per request, they end with the last one whose text has a saved
    state."""
    known, states = known_pages(index, chain, tokens), index.states
    if states is None:
        return known
    have_states = [index.keys[entry.page] in states.of_texts for entry in known]
    return known[: max((i for i, has in enumerate(have_states, 1) if has), default=0)]


def known_pages(index: PageIndex, chain: Chain, tokens: tuple[int, ...]) -> tuple[Entry, ...]:
    """The entries of a text's whole pages, from the end of the chain up to the first page without
    one. They never cover the last token, which must be read to get the token after it."""
    parent, found = chain.parent, []
    for at in range(chain.pages, (len(tokens) - 1) // index.page_size):
        entry = index.entries.get(index.key(parent, at, tokens))
        if entry is None:
            break
        found.append(entry)
        parent = entry.serial
    return tuple(found)


def with_request(
    index: PageIndex, request: int, chain: Chain, found: Sequence[Entry] = ()
) -> PageIndex:
    """The index after a request has begun whose text starts with this chain and these entries. Its
    further pages may get entries from now on."""
    states = index.states
    if found:
        chain = Chain(found[-1].serial, chain.pages + len(found))
        if states is not None:
            states = saved_states.used(states, index.keys[found[-1].page])
    chains = changed(index.chains, {request: chain})
    return dataclasses.replace(index, chains=chains, states=states)


def without_request(index: PageIndex, request: int, failed: bool = False) -> PageIndex:
    """The index after a request has ended. States that it saved stay if they can be found and it
    did not fail."""
    states = index.states
    if states is not None:
        keeps = lambda key: not failed and key in index.entries
        states = saved_states.without_request(states, request, keeps)
    return dataclasses.replace(index, chains=removed(index.chains, [request]), states=states)


def with_state(
    index: PageIndex, request: int, tokens: tuple[int, ...]
) -> tuple[PageIndex, int | None]:
    """Gives a row to the state after the next page of a request's chain. Returns None in place of
    the row if another request has saved that state."""
    states, chain = index.states, index.chains[request]
    assert states is not None, "no layer keeps one state per request"
    key = index.key(chain.parent, chain.pages, tokens)
    if key in states.of_texts:
        return dataclasses.replace(index, states=saved_states.used(states, key)), None
    states = saved_states.saved(states, key, request)
    return dataclasses.replace(index, states=states), states.of_texts[key].row


def has_new(index: PageIndex, request: int, positions: int) -> bool:
    """Whether a request with this many committed positions has full pages that have not been
    compared with the index."""
    chain = index.chains.get(request)
    return chain is not None and index.whole_pages(positions) > chain.pages


def filled(
    index: PageIndex, texts: Iterable[tuple[int, Sequence[int], tuple[int, ...]]]
) -> PageIndex:
    """The index after these requests, given with their pages, have committed these tokens. Each
    whole page gets an entry, unless its text has one already."""
    entries, keys, chains = index.entries.copy(), index.keys.copy(), index.chains.copy()
    serial = index.next_serial
    for request, pages, tokens in texts:
        parent, count = chains[request].parent, index.whole_pages(len(tokens))
        for at in range(chains[request].pages, count):
            key = index.key(parent, at, tokens)
            if key not in entries:
                entries[key], keys[pages[at]] = Entry(pages[at], serial), key
                serial += 1
            parent = entries[key].serial
        chains[request] = Chain(parent, count)
    return dataclasses.replace(
        index,
        entries=MappingProxyType(entries),
        keys=MappingProxyType(keys),
        chains=MappingProxyType(chains),
        next_serial=serial,
    )


def without_pages(index: PageIndex, pages: Iterable[int]) -> PageIndex:
    """The index without the entries of these pages."""
    gone = [page for page in pages if page in index.keys]
    if not gone:
        return index
    texts, states = [index.keys[page] for page in gone], index.states
    return dataclasses.replace(
        index,
        entries=removed(index.entries, texts),
        keys=removed(index.keys, gone),
        states=None if states is None else saved_states.without_texts(states, texts),
    )


def emptied(index: PageIndex, salts: Mapping[int, Salt] = NONE) -> PageIndex:
    """The index without entries. From now on, only requests in `salts` and requests that come later
    can get entries for their pages. Serial numbers are not used again."""
    chains = MappingProxyType({request: Chain(salt) for request, salt in salts.items()})
    states = None if index.states is None else saved_states.emptied(index.states)
    return dataclasses.replace(index, entries=NONE, keys=NONE, chains=chains, states=states)
