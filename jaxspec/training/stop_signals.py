"""Signals that ask a program to end, as a flag that a loop can look at."""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def stop_requested() -> Iterator[threading.Event]:
    """Set by Ctrl-C and SIGTERM, which have no other effect in the meantime.

    A training step takes its state donated: ending inside a step would leave no state to keep.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread may handle signals
        return
    handlers = {
        number: signal.signal(number, lambda *_: stop.set())
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield stop
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
