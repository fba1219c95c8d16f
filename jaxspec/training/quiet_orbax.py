"""Keeps Orbax from printing tracebacks for a failure that it also raises."""

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def quiet_orbax() -> Iterator[None]:
    """Silences what Orbax prints besides raising: for a full disk it logs three tracebacks, and its
    threads then report to an event loop that is closed, which Python prints as well."""
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
