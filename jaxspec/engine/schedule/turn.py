"""Whose turn it is: at any time one thread works on an engine, and the others wait.

This is the only place that takes and gives back the lock, because a signal can arrive between any
two lines. CPython handles signals at the start of a function, after a call and at the end of a loop
round, so a signal cannot come between taking the lock and the `try` that gives it back, nor between
entering a `finally` and its first call. Tests that raise at every line leave this file out.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Concatenate, Protocol, runtime_checkable

from jaxspec.errors import UsageError


class Turn:
    """A lock that refuses a second entry by the thread that holds it, and that is fair: a thread
    that waits gets it before the thread that has just given it back."""

    def __init__(self) -> None:
        self._next = threading.RLock()
        """Held by the thread that is next, until its turn comes."""
        self._lock = threading.RLock()
        self._owner: int | None = None

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread has the turn: it is inside a callback of the engine."""
        return self._owner == threading.get_ident()

    def take(self) -> None:
        """Waits for the turn. The caller gives it back in the `finally` of a `try` that follows."""
        me = threading.get_ident()
        if self._owner == me:
            raise UsageError(
                "the engine was called by an observer or a proposer that it was itself calling; "
                "call it after the step has ended"
            )
        try:
            with self._next:
                self._lock.acquire()
            self._owner = me
        except BaseException:
            try:
                self._lock.release()
            except RuntimeError:  # the signal came before the lock was taken
                pass
            raise

    def give_back(self) -> None:
        self._owner = None
        self._lock.release()

    @contextmanager
    def held(self) -> Iterator[None]:
        """For a `with` block of a caller who has the engine to itself."""
        self.take()
        try:
            yield
        finally:
            self.give_back()


@runtime_checkable
class TakesTurns(Protocol):
    """An object whose methods run one at a time."""

    @property
    def turn(self) -> Turn: ...


def in_turn[Owner: TakesTurns, **Arguments, Result](
    method: Callable[Concatenate[Owner, Arguments], Result],
) -> Callable[Concatenate[Owner, Arguments], Result]:
    """Makes a method wait for the turn of its object."""

    @functools.wraps(method)
    def guarded(self: Owner, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        turn = self.turn
        turn.take()
        try:
            return method(self, *args, **kwargs)
        finally:
            turn.give_back()

    return guarded
