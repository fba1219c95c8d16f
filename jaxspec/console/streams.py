"""Standard output and error of a command, if they are full, closed, or not there at all."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jaxspec.errors import LoadError, one_line


class _Results:
    """Standard output whose failures are errors in one line. A reader that left, as `head` does, is
    no failure: its BrokenPipeError passes through."""

    def __init__(self, stream: Any):
        self.stream = stream

    def write(self, text: str) -> int:
        if self.stream is None:
            raise LoadError("standard output is closed; open it, or write it to a file with > FILE")
        with self._named_failures():
            return self.stream.write(text)

    def flush(self) -> None:
        if self.stream is not None:
            with self._named_failures():
                self.stream.flush()

    @contextmanager
    def _named_failures(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except (OSError, ValueError) as error:  # a ValueError if it was closed meanwhile
            write_no_more(self.stream)
            raise LoadError(
                f"standard output cannot be written: {one_line(error)}; free some space or write "
                "elsewhere"
            ) from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def open_streams() -> Iterator[None]:
    """Inside, standard output fails in words, and what is said on standard error is discarded if
    there is no standard error."""
    before = sys.stdout, sys.stderr
    results: Any = _Results(sys.stdout)
    sys.stdout = results
    with open(os.devnull, "w") as nowhere:
        sys.stderr = before[1] or nowhere
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before


def write_no_more(stream: Any) -> None:
    """Discards the rest of a stream that cannot be written, so that it does not fail at exit."""
    try:
        number = stream.fileno()
    except (OSError, ValueError, AttributeError):  # no file of the system's
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)
