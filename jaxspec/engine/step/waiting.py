"""Waits for a program no longer than a limit.

A device that waits for another device, or for another process, does so inside a program. A thread
that launches such a program, or waits for its results, cannot be interrupted. So if there is a
limit, another thread does this, and is left behind if it takes too long.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future

from jaxspec.errors import JaxspecError


class StepTimeout(JaxspecError):
    """A step did not end in time, so nothing can run on its devices any more."""


def within[Result](limit_s: float, call: Callable[[], Result]) -> Result:
    """What the call returns or raises. Raises StepTimeout if it has not ended after `limit_s`
    seconds."""
    ended: Future[Result] = Future()
    # Not a thread of a pool, because the interpreter waits for these when it ends.
    threading.Thread(target=_tell, args=(call, ended), daemon=True).start()
    try:
        ended.exception(limit_s)
    except TimeoutError:
        raise StepTimeout(
            f"a step did not end within step_timeout, which is {limit_s:g} s: a device or another "
            "process does not answer; this engine cannot go on, so end the process"
        ) from None
    return ended.result()


def _tell[Result](call: Callable[[], Result], ended: Future[Result]) -> None:
    try:
        ended.set_result(call())
    except BaseException as error:
        ended.set_exception(error)
