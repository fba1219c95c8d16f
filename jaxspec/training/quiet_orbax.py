"""Keeps Orbax from printing tracebacks for a failure that it also raises."""

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def quiet_orbax() -> Iterator[None]:
    """Orbax logs three tracebacks for a full disk before it raises. Its threads then report to an
    event loop that it has closed, which Python prints as an exception without an owner."""
    logger = logging.getLogger("absl")
    before, logger.disabled = logger.disabled, True
    complain = sys.unraisablehook

    def complain_of_others(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            complain(unraisable)

    sys.unraisablehook = complain_of_others
    try:
        yield
    finally:
        logger.disabled = before
        sys.unraisablehook = complain
