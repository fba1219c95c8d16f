"""Failures to write a run's files, as errors of one line."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from jaxspec.errors import LoadError, one_line


@contextlib.contextmanager
def writing_to(out: Path) -> Iterator[None]:
    """Turns a failure to write below `out` into a LoadError.

    Errors in reading the inputs of a run have messages of their own, and are not changed.
    """
    try:
        yield
    except BrokenPipeError:
        raise  # the terminal was closed; the disk is not at fault
    except (OSError, SafetensorError) as error:
        raise LoadError(
            f"cannot write to {out} ({one_line(error)[:200]}); its last good state is kept: free "
            "some space and run the same command again, or give another --out"
        ) from error
