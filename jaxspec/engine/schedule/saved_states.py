"""Which saved state belongs to which text: an immutable book, and its transitions.

What a layer with one state per request keeps cannot be shared page by page: a request that begins
after a page needs the state after all tokens up to its end. So some states are saved, in rows of
the layers' own arrays that belong to no slot:

    text      t0 .. t63           t64 .. t127         t128 .. t191        t192 ..
    entry     page 7              page 3              page 9
    state     none                row 2               none                the slot's own

A text is identified by the key of its last page (`page_index.py`), so a state is never taken for
that of another text. A row may be overwritten as soon as it is given to another text, because the
device copies states in the order in which the host launches the copies.
"""

import dataclasses
from collections.abc import Callable, Collection, Hashable
from types import MappingProxyType

from jaxspec.engine.schedule.mappings import NONE, changed, removed


@dataclasses.dataclass(frozen=True)
class Saved:
    """The state after a text."""

    row: int
    by: int
    """The request that saved it."""


@dataclasses.dataclass(frozen=True, eq=False)
class SavedStates:
    """The rows that hold states, and those that hold none."""

    every: int
    """States are saved only at multiples of this many tokens, which are ends of pages."""
    free: tuple[int, ...]
    of_texts: MappingProxyType[Hashable, Saved] = NONE
    """By the key of a text's last page, the least recently used first."""

    @property
    def total(self) -> int:
        return len(self.free) + len(self.of_texts)

    def last_boundary(self, tokens: int) -> int:
        """The last length up to `tokens` at which a state may be saved."""
        return tokens // self.every * self.every


def new_states(rows: int, every: int) -> SavedStates:
    """A book of `rows` rows, none of which holds a state."""
    return SavedStates(every, tuple(range(rows)))


def used(states: SavedStates, key: Hashable) -> SavedStates:
    """The states after that of one text was used, which makes it the last to be overwritten."""
    after = removed(states.of_texts, [key])
    return dataclasses.replace(states, of_texts=changed(after, {key: states.of_texts[key]}))


def saved(states: SavedStates, key: Hashable, by: int) -> SavedStates:
    """The states with a row for that of a text that had none: a free row, or the row of the least
    recently used state."""
    assert key not in states.of_texts, "the state of this text is saved already"
    if not states.free:
        states = without_texts(states, [next(iter(states.of_texts))])
    row, *free = states.free
    of_texts = changed(states.of_texts, {key: Saved(row, by)})
    return dataclasses.replace(states, free=tuple(free), of_texts=of_texts)


def without_texts(states: SavedStates, keys: Collection[Hashable]) -> SavedStates:
    """The states after these texts can no longer be found: their rows are free."""
    gone = [key for key in keys if key in states.of_texts]
    if not gone:
        return states
    rows = (states.of_texts[key].row for key in gone)
    of_texts = removed(states.of_texts, gone)
    return dataclasses.replace(states, free=(*states.free, *rows), of_texts=of_texts)


def without_request(
    states: SavedStates, request: int, keeps: Callable[[Hashable], bool]
) -> SavedStates:
    """The states after a request has ended. Of those that it saved, only those stay for whose key
    `keeps` is true."""
    own = [key for key, one in states.of_texts.items() if one.by == request]
    return without_texts(states, [key for key in own if not keeps(key)])


def emptied(states: SavedStates) -> SavedStates:
    """The states with all rows free."""
    return without_texts(states, [*states.of_texts])
