"""Requests that nobody waits for any more. Any thread can add some at any time."""

import weakref
from collections import deque
from collections.abc import Iterable, Sequence


class Owned(weakref.ref[object]):
    """A weak reference to the owner of some requests."""

    ids: Sequence[int] = ()


class Abandoned:
    """The requests that are to be dropped.

    Python can collect an object in the middle of any function, and the callback that then runs must
    change nothing that this function works on. So it only adds to a queue. The callback is a method
    of the queue itself, because a function of ours could be interrupted by a signal.
    """

    def __init__(self) -> None:
        self._owned: set[Owned] = set()
        """Keeps the references, without which there is no callback."""
        self.queue: deque[Sequence[int] | Owned] = deque()

    def when_collected(self, owner: object, ids: Sequence[int]) -> None:
        """The requests are abandoned when their owner is collected."""
        owned = Owned(owner, self.queue.append)
        owned.ids = ids
        self._owned.add(owned)

    def add(self, ids: Sequence[int]) -> None:
        self.queue.append(ids)

    def oldest(self, count: int) -> set[int]:
        """The requests of the first `count` entries."""
        return {id for entry in list(self.queue)[:count] for id in _ids(entry)}

    def forget(self, count: int) -> None:
        """Removes the first `count` entries, whose requests were dropped."""
        for _ in range(count):
            if isinstance(entry := self.queue[0], Owned):
                self._owned.discard(entry)
            self.queue.popleft()


def _ids(entry: Iterable[int] | Owned) -> Iterable[int]:
    return entry.ids if isinstance(entry, Owned) else entry
