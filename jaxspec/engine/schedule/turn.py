"""A fair lock with which one thread at a time works on an engine, while the others wait.

Only this file takes and releases the lock, because a signal can arrive between any two lines.
CPython handles signals at the start of a Python function, after a call of a C function and at the
end of a loop round. So none arrives between the return of `take` and the `try` after it. Every
`finally` releases the lock itself instead of calling a function of ours: a signal that arrived at
the start of that function would leave the lock taken for ever. Tests that raise an exception at
every line leave this file out; tests that send real signals include it.
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
        self.lock = threading.RLock()
        self.owner: int | None = None

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread has the turn, as it does inside a callback of the engine."""
        return self.owner == threading.get_ident()

    def take(self) -> None:
        """Waits for the turn. A `try` whose `finally` gives it back must follow at once."""
        me = threading.get_ident()
        if self.owner == me:
            raise UsageError(
                "the engine was called by an observer or a proposer that it was itself calling; "
                "call it after the step has ended"
            )
        try:
            with self._next:
                self.lock.acquire()
            self.owner = me
        except BaseException:
            try:
                self.lock.release()
            except RuntimeError:  # the signal came before the lock was taken
                pass
            raise

    @contextmanager
    def held(self) -> Iterator[None]:
        """Gives the caller the turn inside a `with` block."""
        self.take()
        try:
            yield
        finally:
            self.owner = None
            self.lock.release()


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
            turn.owner = None
            turn.lock.release()

    return guarded
