"""Standard output and standard error of a command, which may be full, closed, or missing."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jaxspec.errors import LoadError, one_line


class _Results:
    """Standard output that raises a LoadError if it cannot be written to. A BrokenPipeError passes
    through, because a reader that leaves, as `head` does, is no failure."""

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
    """Inside the context, a failure of standard output is a LoadError, and if there is no standard
    error, what is written to it is discarded."""
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
    except (OSError, ValueError, AttributeError):  # not a file of the operating system
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)
