"""Whose turn it is: at any time one thread works on an engine, and the others wait.

This is the only place that takes and gives back the lock, because a signal can arrive between any
two lines. CPython handles signals at the start of a Python function, after a call of a C function
and at the end of a loop round. So none comes between the return of `take` and the `try` after it.
What gives the lock back is written out in every `finally` and calls nothing but the lock's own
method: a signal that came at the start of a function of ours would leave the lock taken for ever.
Tests that raise at every line leave this file out; those that send real signals do not.
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
        """Whether the calling thread has the turn: it is inside a callback of the engine."""
        return self.owner == threading.get_ident()

    def take(self) -> None:
        """Waits for the turn. A `try` must follow whose `finally` gives it back."""
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
        """For a `with` block of a caller who has the engine to itself."""
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
